// What this page has seen of one pool since it was opened, for the charts.

const KEPT = 600; // pictures, ten minutes when there is one a second
const CHANGES = 100;

/** How a node is to be shown: one of ok, warn, bad, off; the worst of its three words. */
export function lookOf(node) {
  if (node.state === "disabled") return "off";
  if (node.circuit === "open" || node.health === "down") return "bad";
  const well = node.state === "active" && node.health === "ok" && node.circuit === "closed";
  return well ? "ok" : "warn";
}

/** The best of its models' scores. */
export function scoreOf(node) {
  return Math.max(0, ...Object.values(node.scores));
}

export class History {
  constructor() {
    this.times = []; // seconds, Redis' clock
    this.nodes = new Map(); // id → {score, ttft, share, look}, one value for each time
    this.changes = []; // {at, id, text, look}, newest first
    this.noted = 0; // changes in all
    this.drawn = []; // ids of the nodes in the charts
    this.last = new Map(); // id → node
  }

  /** Take a picture of the pool in. */
  add(picture) {
    const at = picture.at_ms / 1000;
    const known = this.times.length;
    if (known && at <= this.times[known - 1]) return;
    this.times.push(at);
    const seen = new Map(picture.nodes.map((node) => [node.id, node]));
    for (const id of seen.keys()) if (!this.nodes.has(id)) this.nodes.set(id, blank(known));
    for (const [id, lines] of this.nodes) {
      const node = seen.get(id);
      lines.score.push(node ? scoreOf(node) : null);
      lines.ttft.push(node ? node.ttft_p50_ms : null);
      lines.share.push(node ? node.share : null);
      lines.look.push(node ? lookOf(node) : null);
    }
    if (known) this.#compare(at, seen, picture.total.nodes > picture.nodes.length);
    this.last = seen;
    this.#forget();
  }

  #compare(at, seen, cut) {
    for (const [id, node] of seen) {
      const before = this.last.get(id);
      if (!before) {
        if (!cut) this.#note(at, id, "added", node);
        continue;
      }
      for (const word of ["state", "health", "circuit"]) {
        if (node[word] !== before[word]) {
          this.#note(at, id, `${word} ${before[word]} → ${node[word]}`, node);
        }
      }
    }
    for (const [id, node] of this.last) {
      if (!seen.has(id) && !cut) this.#note(at, id, "removed", { ...node, state: "disabled" });
    }
  }

  #note(at, id, text, node) {
    this.changes.unshift({ at, id, text, look: lookOf(node) });
    this.changes.length = Math.min(this.changes.length, CHANGES);
    this.noted += 1;
  }

  #forget() {
    const over = this.times.length - KEPT;
    if (over <= 0) return;
    this.times.splice(0, over);
    for (const [id, lines] of this.nodes) {
      for (const values of Object.values(lines)) values.splice(0, over);
      if (lines.look.every((look) => look === null)) this.nodes.delete(id);
    }
  }
}

function blank(length) {
  const empty = () => new Array(length).fill(null);
  return { score: empty(), ttft: empty(), share: empty(), look: empty() };
}
