// Lines over time by uPlot, and the time line of states as SVG.

/* global uPlot */
const MOST = 8; // nodes in a chart: more cannot be told apart
const ROWS = 40; // of the time line
const HEIGHT = 190;
const SPAN_S = 60; // shown at least, so that the first seconds do not fill the chart
const SVG = "http://www.w3.org/2000/svg";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The nodes that charts show: at first the busiest. Who is in stays, and keeps its colour. */
export function chosen(history) {
  const kept = history.drawn.filter((id) => history.nodes.has(id));
  const weight = (id) => history.last.get(id)?.active ?? -1;
  const others = [...history.nodes.keys()].filter((id) => !kept.includes(id));
  others.sort((a, b) => weight(b) - weight(a) || (a < b ? -1 : 1));
  history.drawn = [...kept, ...others.slice(0, MOST - kept.length).sort()];
  return history.drawn;
}

/** The colour of the n-th of `chosen`. */
export const colour = (n) => css(`--line-${n + 1}`);

function range(history) {
  const last = history.times.at(-1) ?? 0;
  return [Math.min(history.times[0] ?? 0, last - SPAN_S), last];
}

/** One chart: `line(lines)` picks what it shows of a node, `say(value)` words it. */
export class Chart {
  constructor(place, { line, say, stacked = false, top = null }) {
    Object.assign(this, { place, line, say, stacked, top, made: "", plot: null });
  }

  draw(history) {
    const ids = chosen(history);
    const rows = ids.map((id) => this.line(history.nodes.get(id)));
    const width = this.place.clientWidth;
    const made = JSON.stringify([ids, css("--text"), width > 0]);
    if (made !== this.made) this.#make(ids, width, made);
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.rows = rows;
    this.span = range(history);
    this.plot.setData([history.times, ...(this.stacked ? stack(rows) : rows)]);
  }

  #make(ids, width, made) {
    this.plot?.destroy();
    const axis = {
      stroke: css("--dim"),
      grid: { stroke: css("--edge"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const series = ids.map((id, n) => ({
      label: id,
      stroke: colour(n),
      width: this.stacked ? 1 : 1.75,
      points: { show: false },
      // Bands fill down to the line below; the lowest one fills to the floor by itself.
      fill: this.stacked && n === 0 ? colour(n) + "99" : undefined,
      value: (_, __, index, at) => {
        const value = at === null ? this.rows[index - 1]?.at(-1) : this.rows[index - 1]?.[at];
        return value === null || value === undefined ? "–" : this.say(value);
      },
    }));
    const options = {
      width,
      height: HEIGHT,
      scales: {
        x: { range: () => this.span },
        y: { range: (_, __, most) => [0, this.top ?? ((most || 1) * 1.1)] },
      },
      series: [{ value: (_, at) => (at ? clock(at) : "now") }, ...series],
      bands: this.stacked
        ? ids.slice(1).map((_, n) => ({ series: [n + 2, n + 1], fill: colour(n + 1) + "99" }))
        : [],
      axes: [
        { ...axis, values: (_, at) => at.map(clock), space: 80, size: 28 },
        { ...axis, values: (_, at) => at.map(this.say), size: 48, space: 36 },
      ],
      cursor: { sync: { key: "time" }, y: false, drag: { x: false, y: false } },
      legend: { live: true },
    };
    this.span = [0, 1];
    this.rows = [];
    this.plot = new uPlot(options, [[], ...ids.map(() => [])], this.place);
    this.made = made;
  }
}

// Each line on top of the one before; nothing where no node has anything.
function stack(rows) {
  let below = rows[0]?.map((_, at) => (rows.every((row) => row[at] === null) ? null : 0));
  return rows.map((row) => {
    below = row.map((value, at) => (below[at] === null ? null : below[at] + value));
    return below;
  });
}

/** A time of Redis' clock as people of this place say it. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** The looks of the nodes, a row of coloured pieces each. */
export function drawTimeline(place, history) {
  const [from, to] = range(history);
  const ids = [...history.nodes.keys()].sort().slice(0, ROWS);
  const rows = ids.map((id) => row(id, history, from, to));
  const axis = element("div", "axis");
  for (const at of [from, (from + to) / 2, to]) axis.append(element("span", "", clock(at)));
  place.replaceChildren(...rows, axis);
}

function row(id, history, from, to) {
  const looks = history.nodes.get(id).look;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${to - from} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${id}: ${looks.at(-1) ?? "gone"} now`);
  for (let start = 0, end; start < looks.length; start = end) {
    for (end = start + 1; end < looks.length && looks[end] === looks[start]; ) end += 1;
    if (looks[start] === null) continue;
    const piece = document.createElementNS(SVG, "rect");
    const until = history.times[end] ?? to;
    // What has just begun has no length yet, and shows all the same.
    piece.setAttribute("x", Math.min(history.times[start], to - 0.5) - from);
    piece.setAttribute("width", Math.max(until - history.times[start], 0.5));
    piece.setAttribute("height", 1);
    piece.setAttribute("data-look", looks[start]);
    svg.append(piece);
  }
  const line = element("div", "row");
  line.append(element("span", "name", id), svg);
  return line;
}

/** A new element with a class and a text; text never becomes markup. */
export function element(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}
