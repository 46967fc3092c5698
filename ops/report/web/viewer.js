const ROW = 52, MARGIN = 12;

function option(values, all) {
  return el("select", { "aria-label": all }, el("option", { value: "" }, all), values.map((value) => el("option", { value }, value.replaceAll("_", " "))));
}

function filters(episodes) {
  const distinct = (name) => [...new Set(episodes.map((episode) => episode[name]).filter((value) => !missing(value)))].sort();
  const found = {
    search: el("input", { type: "search", placeholder: "Search id, task, instruction, transcript, diff …", "aria-label": "Search" }),
    outcome: option(distinct("outcome"), "any outcome"),
    family: option(distinct("family"), "any family"),
    task: option(distinct("task_id"), "any task"),
    fate: option(["kept", ...distinct("reason")], "kept or not"),
    low: el("input", { type: "number", step: "any", placeholder: "min", "aria-label": "least reward" }),
    high: el("input", { type: "number", step: "any", placeholder: "max", "aria-label": "greatest reward" }),
    order: el("select", { "aria-label": "order" }, [["", "as sampled"], ["reward", "lowest reward first"], ["-reward", "highest reward first"], ["-policy_tokens", "longest first"], ["-turns", "most turns first"], ["-seconds", "slowest first"]].map(([value, name]) => el("option", { value }, name))),
  };
  const reset = el("button", { type: "button" }, "clear");
  byId("filters").append(found.search, found.outcome, found.family, found.task, found.fate, el("label", null, "reward", found.low, "to", found.high), found.order, reset);
  return { ...found, reset };
}

function matcher(data, inputs) {
  const texts = new Map();
  const textOf = (episode) => {
    if (!texts.has(episode)) {
      const task = data.viewer.tasks[episode.task_id] || {};
      texts.set(episode, [episode.episode_id, episode.group_id, episode.task_id, episode.family, task.instruction, episode.diff, plainText(episode, data.viewer.vocabulary)].join("\n").toLowerCase());
    }
    return texts.get(episode);
  };
  return () => {
    const words = inputs.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const low = inputs.low.value === "" ? null : Number(inputs.low.value), high = inputs.high.value === "" ? null : Number(inputs.high.value);
    const fits = (episode) =>
      (!inputs.outcome.value || episode.outcome === inputs.outcome.value) && (!inputs.family.value || episode.family === inputs.family.value) &&
      (!inputs.task.value || episode.task_id === inputs.task.value) && (!inputs.fate.value || (inputs.fate.value === "kept" ? episode.kept : episode.reason === inputs.fate.value)) &&
      (low === null || (!missing(episode.reward) && episode.reward >= low - 1e-6)) && (high === null || (!missing(episode.reward) && episode.reward <= high + 1e-6)) &&
      words.every((word) => textOf(episode).includes(word));
    const found = data.viewer.episodes.filter(fits), name = inputs.order.value.replace("-", "");
    const sign = inputs.order.value.startsWith("-") ? -1 : 1, key = (episode) => (missing(episode[name]) ? Infinity : sign * episode[name]);
    return name ? found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0)) : found;
  };
}

function listRow(episode, index, chosen, choose) {
  return el("div", { class: `row ${episode === chosen ? "on" : ""}`, role: "option", "aria-selected": String(episode === chosen), style: { top: `${index * ROW}px` }, onclick: () => choose(index) },
    el("div", null, badge(episode.outcome), el("span", { class: "grow" }, episode.task_id), el("b", null, missing(episode.reward) ? "–" : episode.reward.toFixed(2))),
    el("div", { class: "sub" }, el("span", { class: "mono grow" }, episode.episode_id.slice(0, 12)), el("span", null, `sample ${episode.sample}, ${episode.turns} turns, ${count(episode.policy_tokens)} tokens`)));
}

function testResults(episode, task) {
  if (missing(episode.tests_total)) return [el("h3", null, "Hidden tests"), el("p", { class: "quiet" }, "Not graded.")];
  const head = el("h3", null, "Hidden tests", el("small", null, `${count(episode.tests_passed)} of ${count(episode.tests_total)} passed, run ${episode.verdict.replaceAll("_", " ")}`));
  const status = episode.tests_passed === episode.tests_total ? "passed" : episode.tests_passed === 0 ? "failed" : null;
  const tests = episode.tests || (task.tests || []).map((name) => ({ name, status, message: "" }));
  const found = episode.findings || [];
  const findings = found.length ? [el("h3", null, "Findings", el("small", null, "what this final state tried on its verdict")), el("ul", { class: "tests" }, found.map((name) => el("li", null, el("code", null, name))))] : [];
  return [...findings, head, el("ul", { class: "tests" }, tests.map((test) => el("li", null, test.status && badge(test.status), " ", el("code", null, test.name), test.message && el("pre", null, test.message))))];
}

/* What each composed component of the reward found, and why. */
function evidence(episode) {
  if (!episode.evidence) return null;
  const answers = (found) => found.answers.length ? el("details", null, el("summary", null, found.answers.length === 1 ? "what was answered" : `${count(found.answers.length)} answers`), found.answers.map((text) => el("pre", null, text))) : null;
  return [
    el("h3", null, "Reward components", el("small", null, "value before its weight; the sum above counts it with its weight")),
    el("ul", { class: "tests" }, episode.evidence.map((found) => el("li", null, el("code", null, found.name), " ", el("b", null, missing(found.value) ? "no value" : short(found.value)), " ", found.reason, answers(found)))),
  ];
}

function detail(episode, data, select) {
  const task = data.viewer.tasks[episode.task_id] || {};
  const fact = (name, value) => el("span", null, `${name} `, el("b", null, value));
  const components = Object.entries(episode.components || {}).map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const mates = data.viewer.episodes.filter((each) => each.group_id === episode.group_id);
  const whole = el("p", { class: "quiet" }, "Tokens, calls and diff are not in this page, to keep it small: ", copyable(`triplane episodes show ${episode.episode_id}`));
  return [
    el("div", { class: "head" }, badge(episode.outcome), el("b", null, episode.task_id), !missing(episode.kept) && badge(episode.kept ? "kept" : `left out: ${episode.reason}`), episode.quarantine && el("span", null, `quarantined by ${episode.quarantine}`)),
    task.instruction && el("p", null, task.instruction),
    el("div", { class: "facts" }, fact("reward", missing(episode.reward) ? "–" : short(episode.reward)), components && el("span", null, `(${components})`), fact("group mean", short(episode.group_mean)), fact("family", episode.family), fact("ended", episode.ended.replaceAll("_", " ")), fact("turns", episode.turns), fact("tokens", `${count(episode.policy_tokens)} of ${count(episode.length)}`), episode.format_errors ? fact("format errors", episode.format_errors) : null, fact("took", seconds(episode.seconds))),
    el("div", { class: "facts" }, el("span", null, "group "), mates.map((mate) => el("button", { type: "button", "aria-pressed": String(mate === episode), onclick: () => select(mate) }, `#${mate.sample}: ${missing(mate.reward) ? "–" : mate.reward.toFixed(1)}`))),
    episode.sequences ? [
      transcript(episode, data.viewer.vocabulary),
      el("h3", null, "Tool calls", el("small", null, count(episode.calls.length))), episode.calls.map(toolCall),
      el("h3", null, "Final diff"), diffView(episode.diff),
    ] : whole,
    testResults(episode, task),
    evidence(episode),
    task.reference && el("details", null, el("summary", null, "Reference fix"), diffView(task.reference)),
    el("h3", null, "Lineage"),
    el("div", null, el("div", null, "episode ", copyable(episode.episode_id)), el("div", null, "policy ", copyable(episode.policy_version)), el("div", null, "group ", copyable(episode.group_id)),
      el("div", null, "what made it, and what was trained on it: ", copyable(`triplane lineage ${episode.episode_id}`)), el("div", null, "in a terminal: ", copyable(`triplane episodes show ${episode.episode_id}`))),
  ];
}

/* A list that only draws the rows in sight, and the episode chosen from it. */
function viewer(data) {
  const inputs = filters(data.viewer.episodes), find = matcher(data, inputs), list = byId("list");
  let rows = [], chosen = null;
  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - MARGIN), last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + MARGIN);
    const shown = rows.slice(first, last).map((episode, offset) => listRow(episode, first + offset, chosen, choose));
    list.replaceChildren(el("div", { style: { height: `${rows.length * ROW}px` } }), ...shown, ...(rows.length ? [] : [el("div", { class: "empty" }, "No episode answers to this.")]));
  }
  function select(episode) {
    chosen = episode;
    history.replaceState(null, "", `#episode=${episode.episode_id}`);
    byId("detail").replaceChildren(el("div", null, detail(episode, data, select)));
    byId("detail").scrollTop = 0;
    draw();
  }
  function choose(index) {
    const top = index * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    select(rows[index]);
  }
  function refresh() {
    rows = find();
    const listed = data.viewer.episodes.length, total = data.viewer.total;
    byId("count").textContent = `${count(rows.length)} of ${count(listed)}${total > listed ? `, a sample of ${count(total)}` : ""}; arrow keys or j and k go through them`;
    list.scrollTop = 0;
    draw();
  }
  for (const input of Object.values(inputs)) input.addEventListener("input", refresh);
  inputs.reset.addEventListener("click", () => { for (const input of Object.values(inputs)) if ("value" in input && input !== inputs.reset) input.value = ""; refresh(); });
  list.addEventListener("scroll", draw);
  addEventListener("resize", draw);
  byId("episodes").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || /^(INPUT|SELECT)$/.test(event.target.tagName) || !rows.length) return;
    event.preventDefault();
    choose(Math.min(rows.length - 1, Math.max(0, rows.indexOf(chosen) + step)));
  });
  refresh();
  const asked = /^#episode=([0-9a-f]+)$/.exec(location.hash), wanted = asked && data.viewer.episodes.find((each) => each.episode_id.startsWith(asked[1]));
  if (wanted) { choose(rows.indexOf(wanted)); byId("episodes").scrollIntoView({ behavior: "instant" }); } else if (rows.length) {
    byId("detail").replaceChildren(el("div", null, detail(rows[0], data, select)));
    chosen = rows[0];
    draw();
  }
}
