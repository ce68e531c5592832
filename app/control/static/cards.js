// One card for each node, changed in place: what has the focus keeps it.

import { lookOf, scoreOf } from "./history.js";

const template = document.getElementById("node-template");

/** A number to three digits, without an exponent. */
export function brief(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return Math.round(value).toString();
  return Number(value.toPrecision(3)).toString();
}

export class Cards {
  /** `change(node)` is called when the button of a card is pressed. */
  constructor(place, change) {
    this.place = place;
    this.change = change;
    this.cards = new Map();
  }

  draw(nodes) {
    const best = Math.max(...nodes.map(scoreOf), 0);
    const ids = new Set(nodes.map((node) => node.id));
    for (const [id, card] of this.cards) {
      if (!ids.has(id)) {
        card.root.remove();
        this.cards.delete(id);
      }
    }
    nodes.forEach((node, at) => {
      const card = this.cards.get(node.id) ?? this.#make(node);
      if (this.place.children[at] !== card.root) {
        this.place.insertBefore(card.root, this.place.children[at] ?? null);
      }
      fill(card, node, best);
    });
  }

  #make(node) {
    const root = template.content.cloneNode(true).firstElementChild;
    const card = { root, fields: {}, bars: {}, node };
    for (const field of root.querySelectorAll("[data-field]")) {
      card.fields[field.dataset.field] = field;
    }
    for (const bar of root.querySelectorAll("[data-bar]")) card.bars[bar.dataset.bar] = bar;
    root.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.change(card.node);
    });
    this.cards.set(node.id, card);
    return card;
  }
}

function fill(card, node, best) {
  card.node = node;
  const score = scoreOf(node);
  const look = lookOf(node);
  card.root.dataset.node = node.id;
  card.root.dataset.look = look;
  const texts = {
    id: node.id,
    look: worst(node),
    verb: node.state === "active" ? "Drain…" : "Enable",
    health: node.health,
    circuit: worded(node.circuit),
    state: node.state,
    score: brief(score),
    load: `${node.active} / ${node.capacity}`,
    share: node.share === null ? "–" : `${Math.round(node.share * 100)} %`,
    p50: milliseconds(node.ttft_p50_ms),
    p99: milliseconds(node.ttft_p99_ms),
    rate: brief(node.tokens_per_s),
    weight: brief(node.weight),
    models: node.models.join(", "),
  };
  for (const [name, text] of Object.entries(texts)) put(card.fields[name], text);
  const verb = node.state === "active" ? "Drain" : "Enable";
  card.fields.verb.setAttribute("aria-label", `${verb} ${node.id}`);
  const parts = {
    score: best ? score / best : 0,
    load: node.active / Math.max(1, node.capacity),
    share: node.share ?? 0,
  };
  for (const [name, part] of Object.entries(parts)) {
    card.bars[name].style.width = `${Math.min(100, 100 * part)}%`;
  }
}

/** What keeps requests away, in one word. */
function worst(node) {
  if (node.state === "draining") return node.active ? "draining" : "drained";
  if (node.state !== "active") return node.state;
  if (node.health !== "ok") return node.health;
  return node.circuit === "closed" ? "ok" : worded(node.circuit);
}

const worded = (circuit) => circuit.replace("_", "-");

function milliseconds(value) {
  return value === null ? "–" : `${brief(value)} ms`;
}

function put(field, text) {
  if (field.textContent !== text) field.textContent = text;
}
