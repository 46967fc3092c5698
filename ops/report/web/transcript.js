const ROLES = ["prompt", "policy", "environment"], ROLE_NAMES = ["task", "policy", "environment"], POLICY = 1, FORCED = 3;
const DOUBT = 400;

/* Texts of a sequence's tokens. */
function tokenTexts(sequence, vocabulary) {
  const joined = sequence.joined || {};
  return sequence.ids.map((id, index) => (index in joined ? joined[index] : vocabulary[id]));
}

function plainText(episode, vocabulary) {
  return (episode.sequences || []).map((sequence) => tokenTexts(sequence, vocabulary).join("")).join("\n");
}

function policyToken(text, id, logprob) {
  const known = logprob >= 0, share = known ? Math.exp(-logprob / 100) : null;
  const tint = known && logprob > 0 ? `rgb(var(--doubt) / ${(0.85 * Math.min(1, logprob / DOUBT) ** 0.6).toFixed(3)})` : "";
  const node = el("span", { class: "token" }, text);
  node.dataset.tint = tint;
  node.dataset.tip = `${JSON.stringify(text)}  id ${id}\n${known ? `logprob −${(logprob / 100).toFixed(2)}, probability ${share < 0.001 ? share.toExponential(1) : percent(share)}` : "no logprob"}`;
  return node;
}

/* A token that the grammar had no alternative to. */
function forcedToken(text, id) {
  const node = el("span", { class: "token forced" }, text);
  node.dataset.tint = "";
  node.dataset.tip = `${JSON.stringify(text)}  id ${id}\nforced by the grammar`;
  return node;
}

function turn({ role, tokens, body }) {
  return el("div", { class: `turn ${ROLES[role]}` }, el("span", { class: "who" }, `${ROLE_NAMES[role]}, ${count(tokens)} tokens`), el("pre", null, body));
}

/* Turns of a sequence; forced tokens belong to the policy's. */
function context(sequence, vocabulary) {
  const texts = tokenTexts(sequence, vocabulary), turns = [];
  let start = 0, logprobAt = 0;
  for (const [kind, length] of sequence.roles) {
    const role = kind === FORCED ? POLICY : kind, own = texts.slice(start, start + length);
    if (!turns.length || turns.at(-1).role !== role) turns.push({ role, tokens: 0, body: [] });
    const last = turns.at(-1), id = (index) => sequence.ids[start + index];
    last.tokens += length;
    if (kind === POLICY) last.body.push(...own.map((text, index) => (text ? policyToken(text, id(index), sequence.logprobs[logprobAt + index]) : null)));
    else if (kind === FORCED) last.body.push(...own.map((text, index) => (text ? forcedToken(text, id(index)) : null)));
    else last.body.push(own.join(""));
    start += length;
    if (kind === POLICY) logprobAt += length;
  }
  return turns.map(turn);
}

/* The transcript with its toggle between colours by role and by logprob; remembers the choice for the next episode. */
const transcriptMode = { doubting: false };
function transcript(episode, vocabulary) {
  const box = el("div", null, episode.sequences.map((sequence, index) => [episode.sequences.length > 1 && el("h3", null, `context ${index + 1}`), context(sequence, vocabulary)]));
  const scale = el("span", { class: "quiet" }, "sure", el("span", { class: "scale" }), "doubtful");
  const buttons = [["role", false], ["logprob", true]].map(([name, doubting]) => el("button", { type: "button", onclick: () => show(doubting) }, `by ${name}`));
  function show(doubting) {
    transcriptMode.doubting = doubting;
    box.classList.toggle("doubting", doubting);
    scale.hidden = !doubting;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String((index === 1) === doubting)));
    for (const node of box.querySelectorAll(".token")) node.style.background = doubting ? node.dataset.tint : "";
  }
  box.addEventListener("pointermove", (event) => tip(event, event.target.dataset ? event.target.dataset.tip : ""));
  box.addEventListener("pointerleave", () => tip(null, ""));
  show(transcriptMode.doubting);
  return [el("h3", null, "Transcript", el("span", { class: "toggles" }, buttons, scale)), box];
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1).replace(/\\n/g, "\n  ");
  } catch {
    return text;
  }
}

const toolCall = (call) =>
  el("div", { class: `call ${call.ok ? "" : "failed"}` }, el("b", null, call.name), ` turn ${call.turn + 1} `, !call.ok && badge("failed"), el("pre", null, pretty(call.arguments)), el("pre", null, call.result));

function diffView(text) {
  if (!text) return el("p", { class: "quiet" }, "Empty: nothing was changed.");
  const kind = (line) => (/^(diff|index|---|\+\+\+|new|deleted|similarity|rename|old)\b|^(---|\+\+\+) /.test(line) ? "file" : line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : "");
  return el("pre", { class: "diff" }, text.replace(/\n$/, "").split("\n").map((line) => el("span", { class: kind(line) }, line)));
}
