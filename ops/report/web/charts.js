const WIDTH = 380, HEIGHT = 180, LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 24;

const card = (title, note, ...body) => el("div", { class: "card" }, el("h3", null, title, note && el("small", null, note)), body);
const legend = (series) =>
  el("div", { class: "legend" }, series.map((each) => el("span", null, el("i", { style: { background: each.color } }), each.name)));

/* Round values that span [low, high], about four of them. */
function ticks(low, high) {
  if (!(high > low)) return [low];
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

function yScale(values, zero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (zero) low = Math.min(0, low);
  if (high === low) { high += Math.abs(high) / 2 || 1; low -= zero ? 0 : Math.abs(low) / 2 || 1; }
  const pad = (high - low) * 0.06;
  [low, high] = [zero && low === 0 ? 0 : low - pad, high + pad];
  const place = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low));
  return { place, marks: ticks(low, high) };
}

function frame(scale, format) {
  return scale.marks.map((mark) => [
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: scale.place(mark), y2: scale.place(mark) }),
    svg("text", { x: LEFT - 6, y: scale.place(mark) + 4, "text-anchor": "end" }, format(mark)),
  ]);
}

function xLabels(labels, place) {
  const every = Math.ceil(labels.length / 8);
  return labels.map((label, index) => (index % every ? null :
    svg("text", { x: place(index), y: HEIGHT - 6, "text-anchor": "middle" }, label)));
}

/* Lines over positions 0..labels.length-1. series: {name, color, values, low?, high?, hollow?}; null values leave gaps. */
function lineChart(title, labels, series, { format = short, zero = false, note = "" } = {}) {
  const known = series.flatMap((each) => [...each.values, ...(each.low || []), ...(each.high || [])]).filter((value) => !missing(value));
  if (!known.length) return null;
  const scale = yScale(known, zero);
  const place = (index) => (labels.length < 2 ? (LEFT + WIDTH - RIGHT) / 2 : LEFT + 8 + ((WIDTH - LEFT - RIGHT - 16) * index) / (labels.length - 1));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, frame(scale, format), xLabels(labels, place));
  for (const each of series) {
    const at = each.values.map((value, index) => [index, value]).filter(([, value]) => !missing(value));
    if (each.low) {
      const edge = (values, order) => order.filter(([index]) => !missing(values[index])).map(([index]) => `${place(index)},${scale.place(values[index])}`);
      picture.append(svg("polygon", { points: [...edge(each.high, at), ...edge(each.low, [...at].reverse())].join(" "), fill: each.color, opacity: 0.13 }));
    }
    picture.append(svg("polyline", { points: at.map(([index, value]) => `${place(index)},${scale.place(value)}`).join(" "), fill: "none", stroke: each.color, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (at.length <= 40) for (const [index, value] of at) {
      const hollow = each.hollow && each.hollow[index];
      picture.append(svg("circle", { cx: place(index), cy: scale.place(value), r: 3.4, fill: hollow ? "var(--card)" : each.color, stroke: each.color, "stroke-width": 1.6 }));
    }
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(cross);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDTH;
    const index = labels.reduce((best, _, each) => (Math.abs(place(each) - x) < Math.abs(place(best) - x) ? each : best), 0);
    fill(cross, { x1: place(index), x2: place(index), visibility: "visible" }, []);
    const lines = series.filter((each) => !missing(each.values[index])).map((each) =>
      `${each.name}: ${format(each.values[index])}${each.low && !missing(each.low[index]) ? `  [${format(each.low[index])}, ${format(each.high[index])}]` : ""}`);
    tip(event, [labels[index], ...lines].join("\n"));
  });
  picture.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(null, ""); });
  return card(title, note, legend(series), picture);
}

/* Bars over positions, one stack a position. series: {name, color, values}. */
function stackedBars(title, labels, series, { format = short, note = "", wide = 0.72, marks = null } = {}) {
  const totals = labels.map((_, index) => series.reduce((sum, each) => sum + (each.values[index] || 0), 0));
  if (!totals.some((total) => total > 0)) return null;
  const scale = yScale([0, ...totals], true), step = (WIDTH - LEFT - RIGHT) / labels.length;
  const centre = (index) => LEFT + step * (index + 0.5), width = Math.min(step * wide, 46);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, frame(scale, short), marks || xLabels(labels, centre));
  labels.forEach((label, index) => {
    let base = 0;
    for (const each of series) {
      const value = each.values[index] || 0;
      if (!value) continue;
      const y = scale.place(base + value), height = Math.max(1, scale.place(base) - y);
      base += value;
      picture.append(svg("rect", { x: centre(index) - width / 2, y, width, height, fill: each.color, rx: series.length > 1 ? 0 : 2 }));
    }
    const lines = series.filter((each) => each.values[index]).map((each) => `${each.name}: ${format(each.values[index])}`);
    picture.append(svg("rect", { x: centre(index) - step / 2, y: TOP, width: step, height: HEIGHT - TOP - BOTTOM, fill: "transparent",
      onpointermove: (event) => tip(event, [label, ...lines].join("\n")), onpointerleave: () => tip(null, "") }));
  });
  return card(title, note, series.length > 1 ? legend(series) : null, picture);
}

function histogramChart(title, found, color, note) {
  if (!found || !found.counts.length) return null;
  const edges = found.counts.map((_, index) => found.low + index * found.width);
  const whole = found.width === 1 && Number.isInteger(found.low);
  const labels = edges.map((edge) => (whole ? short(edge) : `${short(edge)} to ${short(edge + found.width)}`));
  const step = (WIDTH - LEFT - RIGHT) / labels.length, every = Math.ceil(labels.length / 8);
  const marks = edges.map((edge, index) => (index % every ? null :
    svg("text", { x: LEFT + step * (index + (whole ? 0.5 : 0)), y: HEIGHT - 6, "text-anchor": "middle" }, short(edge))));
  const series = [{ name: "episodes", color, values: found.counts }];
  return stackedBars(title, labels, series, { format: count, note: found.missing ? `${note}; ${count(found.missing)} not graded` : note, wide: 0.92, marks });
}

/* Horizontal bars with counts and shares. */
function countBars(title, counts, note, color) {
  const entries = Object.entries(counts).sort((a, b) => b[1] - a[1]), total = entries.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return null;
  const bars = entries.map(([name, value]) => [
    el("span", null, name.replaceAll("_", " ")),
    el("div", { class: "track" }, el("div", { class: "fill", style: { width: `${(100 * value) / total}%`, background: color(name) } })),
    el("span", { class: "quiet" }, `${count(value)}  ${percent(value / total)}`),
  ]);
  return card(title, note, el("div", { class: "bars" }, bars));
}

/* One line a family: parent's pass rate to candidate's. */
function dumbbells(title, rows) {
  const height = 26 * rows.length + 34, left = 104, right = 66;
  const x = (rate) => left + (WIDTH + 140 - left - right) * rate;
  const change = (row) => (row.candidate && row.parent ? row.candidate.rate - row.parent.rate : 0);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH + 140} ${height}`, role: "img", "aria-label": title });
  for (const mark of [0, 0.25, 0.5, 0.75, 1]) picture.append(
    svg("line", { class: "axis", x1: x(mark), x2: x(mark), y1: 6, y2: height - 26 }),
    svg("text", { x: x(mark), y: height - 8, "text-anchor": "middle" }, percent(mark, 0)));
  [...rows].sort((a, b) => change(b) - change(a)).forEach((row, index) => {
    const y = 20 + 26 * index, delta = change(row), color = delta > 0 ? "var(--good)" : delta < 0 ? "var(--bad)" : "var(--s6)";
    const told = (who, found) => (found ? `${who}: ${percent(found.rate)} of ${count(found.n)}  [${span(found)}]` : `${who}: not played`);
    picture.append(svg("g", { onpointermove: (event) => tip(event, `${row.family}\n${told("before", row.parent)}\n${told("after", row.candidate)}`), onpointerleave: () => tip(null, "") },
      svg("rect", { x: 0, y: y - 13, width: WIDTH + 140, height: 26, fill: "transparent" }),
      svg("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, row.family.replaceAll("_", " ")),
      row.parent && row.candidate && svg("line", { x1: x(row.parent.rate), x2: x(row.candidate.rate), y1: y, y2: y, stroke: color, "stroke-width": 3 }),
      row.parent && svg("circle", { cx: x(row.parent.rate), cy: y, r: 4.5, fill: "var(--card)", stroke: "var(--s6)", "stroke-width": 2 }),
      row.candidate && svg("circle", { cx: x(row.candidate.rate), cy: y, r: 4.5, fill: delta < 0 ? "var(--bad)" : "var(--s1)" }),
      svg("text", { x: WIDTH + 140 - 4, y: y + 4, "text-anchor": "end", style: { fill: color } }, points(delta))));
  });
  return card(title, "hollow: before, filled: after; in points", picture);
}
