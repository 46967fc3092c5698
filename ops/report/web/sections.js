const ASSET_COLORS = { rollouts: "var(--s1)", rewards: "var(--s3)", dataset: "var(--s5)", checkpoint: "var(--s2)", evaluation: "var(--s4)" };

function signed(value, words) {
  return missing(value) ? null : el("span", { class: value > 0 ? "up" : value < 0 ? "down" : "" }, `${points(value)} `, words);
}

function headline(data) {
  const row = data.rows[data.rows.length - 1], first = data.rows[0];
  const cards = [];
  const add = (label, value, ...notes) => cards.push(el("div", { class: "card" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), notes.filter(Boolean).map((note) => el("div", { class: "note" }, note))));
  for (const [split, label] of [["held_out", "Held-out pass rate"], ["gate", "Gate pass rate"]]) {
    const found = row[split], base = first[split];
    if (!found) continue;
    const sinceBase = base && data.rows.length > 1 ? found.candidate.rate - base.parent.rate : null;
    add(label, percent(found.candidate.rate), `${span(found.candidate)}, n = ${count(found.candidate.n)}`, signed(found.difference.mean, "points vs parent"), signed(sinceBase, "points vs start"));
  }
  if (row.train) add("Train reward, mean", short(row.train.reward), `pass rate ${percent(row.train.rate)}`, `${count(row.train.graded)} graded episodes`);
  add("Episodes", count(row.episodes), missing(row.kept) ? null : `${count(row.kept)} train, ${count(row.episodes - row.kept)} left out`);
  if (!missing(row.solve_rate_bias)) add("Straggler bias", points(row.solve_rate_bias), `points: ${percent(row.solve_rate_kept)} of the kept episodes solved`, `estimate with stragglers: ${percent(row.solve_rate_estimated)}`);
  add("Policy tokens", short(row.policy_tokens), missing(row.tokens_per_second) ? null : `${short(row.tokens_per_second)} tokens sampled a second`);
  if (row.training) add("Training", `${row.training.optimizer_steps} steps`, `loss ${short(row.training.loss)}`, `entropy ${short(row.training.entropy)}`, `KL ${short(row.training.old_kl)}`);
  if (row.seconds) add("Time", seconds(Object.values(row.seconds).reduce((a, b) => a + b, 0)), `rollouts ${seconds(row.seconds.rollouts)}`);
  byId("headline").append(...cards);
  if (data.rollback) byId("decision").append(el("div", { class: "card verdict" }, el("b", null, "Acting policy"), badge("rolled back"), el("span", null, `restored by change ${data.rollback.number} of the registry: ${data.rollback.reason}`)));
  if (!data.decision) return;
  byId("badge").textContent = data.decision.decision;
  byId("badge").className = `badge ${tone(data.decision.decision)}`;
  byId("decision").append(el("div", { class: "card verdict" }, el("b", null, "Decision"), badge(data.decision.decision), data.decision.reasons.map((reason) => el("span", null, reason)),
    el("span", { class: "quiet" }, "candidate ", copyable(data.decision.candidate, data.decision.candidate.slice(0, 12)), " parent ", copyable(data.decision.parent, data.decision.parent.slice(0, 12)))));
}

function curves(data) {
  const rows = data.rows, labels = rows.map((row) => row.iteration), share = (value) => percent(value, 0);
  const base = rows[0].held_out || rows[0].gate ? ["start"] : [];
  const rate = (split, name, color) => {
    const found = rows.map((row) => row[split]), begin = base.length ? [found[0] && found[0].parent] : [];
    const all = [...begin, ...found.map((each) => each && each.candidate)];
    if (!all.some(Boolean)) return null;
    const pick = (what) => all.map((each) => (each ? each[what] : null));
    return { name, color, values: pick("rate"), low: pick("low"), high: pick("high"), hollow: [...begin.map(() => false), ...rows.map((row) => row.decision !== "live")] };
  };
  const rates = [rate("held_out", "held-out", "var(--s1)"), rate("gate", "gate", "var(--s2)")].filter(Boolean);
  const steps = rows.flatMap((row) => ((row.training || {}).steps || []).map((step) => ({ ...step, iteration: row.iteration })));
  const stepLabels = steps.map((step) => String(step.step));
  const training = (title, name, color, options) => lineChart(title, stepLabels, [{ name: `${title} by optimizer step`, color, values: steps.map((step) => step[name]) }], options);
  const assets = [...new Set(rows.flatMap((row) => Object.keys(row.seconds || {})))];
  const named = Object.keys(ASSET_COLORS).filter((asset) => assets.includes(asset)), rest = assets.filter((asset) => !ASSET_COLORS[asset]);
  const spent = named.map((asset) => ({ name: asset, color: ASSET_COLORS[asset], values: rows.map((row) => (row.seconds || {})[asset] || 0) }));
  if (rest.length) spent.push({ name: "other", color: "var(--s6)", values: rows.map((row) => rest.reduce((sum, asset) => sum + ((row.seconds || {})[asset] || 0), 0)) });
  byId("charts").append(...[
    rates.length && lineChart("Pass rate", [...base, ...labels], rates, { format: share, note: "hollow: did not go live" }),
    lineChart("Train reward", labels, [{ name: "mean reward", color: "var(--s3)", values: rows.map((row) => row.train && row.train.reward) }, { name: "pass rate", color: "var(--s4)", values: rows.map((row) => row.train && row.train.rate) }]),
    training("Loss", "loss", "var(--s2)"),
    training("Entropy", "entropy", "var(--s4)", { zero: true }),
    training("KL", "old_kl", "var(--s5)", { note: "to the acting policy", zero: true }),
    lineChart("Tokens a second", labels, [{ name: "tokens sampled a second", color: "var(--s1)", values: rows.map((row) => row.tokens_per_second) }], { zero: true }),
    stackedBars("Seconds by asset", labels, spent, { format: seconds }),
  ].filter(Boolean));
}

function measures(data) {
  const splits = [["held_out", "held-out"], ["unseen", "unseen"]], KEYS = ["greedy", "sampled", "majority", "any"];
  const first = data.rows[0], shown = [["start", (split) => first[split] && first[split].measures && first[split].measures.parent]];
  for (const row of data.rows) shown.push([row.iteration, (split) => row[split] && row[split].measures && row[split].measures.candidate]);
  const known = splits.filter(([split]) => shown.some(([, pick]) => pick(split)));
  byId("measures").parentElement.hidden = !known.length;
  if (!known.length) return;
  const names = (own) => ["greedy", `T=${own.temperature}`, `maj@${own.k}`, `pass@${own.k}`];
  const heads = known.flatMap(([split, label]) => names(shown.map(([, pick]) => pick(split)).find(Boolean)).map((name) => `${label} ${name}`));
  const cell = (own, key) => (own && !missing(own[key].rate) ? el("span", { title: span(own[key]) }, percent(own[key].rate)) : "–");
  const rows = shown.map(([iteration, pick]) => [iteration, ...known.flatMap(([split]) => KEYS.map((key) => cell(pick(split), key)))]);
  byId("measures").append(table(["iteration", ...heads], rows, heads.map((_, index) => index + 1)));
}

function distributions(data) {
  const outcome = (name) => ({ solved: "var(--good)", failed: "var(--bad)", completed: "var(--s1)" })[name] || "var(--warn)";
  const found = data.histograms;
  byId("distributions").append(...[
    histogramChart("Rewards", found.reward, "var(--s3)", "episodes by reward"),
    histogramChart("Length", found.tokens, "var(--s1)", "episodes by policy tokens"),
    histogramChart("Turns", found.turns, "var(--s4)", "episodes by turns"),
    countBars("Outcomes", data.outcomes, "after grading", outcome),
    countBars("Dataset", data.reasons, "kept, and why not", (name) => (name === "kept" ? "var(--good)" : "var(--s6)")),
  ].filter(Boolean));
  const splits = Object.entries(data.families).filter(([, rows]) => rows.length);
  byId("dumbbells").append(...splits.map(([split, rows]) => dumbbells({ gate: "Gate", held_out: "Held-out", unseen: "Unseen" }[split], rows)));
  byId("families").hidden = !splits.length;
}

function table(head, rows, numeric = []) {
  const kind = (index) => (numeric.includes(index) ? "number" : "");
  return el("table", null, el("thead", null, el("tr", null, head.map((name, index) => el("th", { class: kind(index) }, name)))),
    el("tbody", null, rows.map((cells) => el("tr", null, cells.map((cell, index) => el("td", { class: kind(index) }, cell))))));
}

function origin(data) {
  byId("costs").append(el("p", { class: "quiet" }, "Summed over episodes, which run many at once. A policy plays a split once: a run of the parent was mostly paid for by an earlier iteration."), table(["what", "episodes", "engine tokens", "sampling, summed", "tools, summed", "episodes, summed", "retries"],
    data.costs.map((each) => [each.what, count(each.episodes), count(each.engine_tokens), seconds(each.sampling_seconds), seconds(each.tool_seconds), seconds(each.seconds), count(each.retries)]), [1, 2, 3, 4, 5, 6]));
  const spent = Object.entries(data.spent), lost = [...new Set(spent.flatMap(([, own]) => Object.keys(own.tokens_lost || {})))].sort();
  const sum = (own, name, format) => (missing(own[name]) ? "–" : format(own[name]));
  byId("costs").append(el("p", { class: "quiet" }, "By iteration. Tokens lost: of episodes that do not train, by reason. GPU seconds: of the trainer."),
    table(["iteration", "engine tokens", "engine, summed", "sandboxes, summed", "trained tokens", "training", "GPU seconds", ...lost.map((reason) => `lost: ${reason.replaceAll("_", " ")}`)],
      spent.map(([iteration, own]) => [iteration, sum(own, "engine_tokens", count), sum(own, "engine_seconds", seconds), sum(own, "sandbox_seconds", seconds), sum(own, "trained_tokens", count), sum(own, "training_seconds", seconds), sum(own, "gpu_seconds", seconds), ...lost.map((reason) => count((own.tokens_lost || {})[reason] || 0))]), [1, 2, 3, 4, 5, 6, ...lost.map((_, index) => index + 7)]));
  const last = data.rows[data.rows.length - 1].seconds || {};
  byId("inputs").append(table(["asset", "kind", "content digest", "action key", "code", "seconds", "trace"],
    data.inputs.map((each) => [each.asset, each.kind, copyable(each.digest, each.digest.slice(0, 16)), copyable(each.action_key, each.action_key.slice(0, 12)), each.code_version, missing(last[each.asset]) ? "–" : last[each.asset].toFixed(1), copyable(`triplane lineage ${each.digest}`, `triplane lineage ${each.digest.slice(0, 12)}`)]), [5]));
}
