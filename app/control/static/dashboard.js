// The page: follows the gateway's events, shows them, and asks for changes of nodes.

import { Cards, brief } from "./cards.js";
import { Chart, clock, drawTimeline, element } from "./charts.js";
import { History, lookOf } from "./history.js";
import { Refused, events, good, withKey } from "./stream.js";

const KEY = "leaseway-admin-key"; // in sessionStorage: gone with the tab
const PAUSES_MS = [500, 1000, 2000, 5000];
const byId = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

const histories = new Map(); // pool → History
let pictures = []; // of all pools, the last ones
let drawn = false;
let listed = { history: null, noted: 0 }; // what the list of changes holds

const cards = new Cards(byId("nodes"), (node) => change(node));
const percent = (value) => `${Math.round(value * 100)}`;
const charts = [
  new Chart(byId("score"), { line: (node) => node.score, say: brief }),
  new Chart(byId("ttft"), { line: (node) => node.ttft, say: brief }),
  new Chart(byId("share"), { line: (node) => node.share, say: percent, stacked: true, top: 1 }),
];

async function follow() {
  for (let failed = 0; ; failed += 1) {
    try {
      for await (const { name, data } of events("dashboard/events", key())) {
        failed = 0;
        take(name, data);
      }
      trouble("The replica has ended the stream; connecting again.");
    } catch (fault) {
      if (fault instanceof Refused && (fault.status === 401 || fault.status === 403)) {
        await askForKey(fault);
        continue;
      }
      trouble(`No news from the gateway (${fault.message}); connecting again.`);
    }
    await pause(PAUSES_MS[Math.min(failed, PAUSES_MS.length - 1)]);
  }
}

function take(name, data) {
  if (name === "away") {
    trouble(`Redis is away, this is the last picture: ${data.why}`, "Redis away");
    return;
  }
  pictures = data.pools;
  for (const one of pictures) {
    if (!histories.has(one.pool)) histories.set(one.pool, new History());
    histories.get(one.pool).add(one);
  }
  trouble("");
  live(`live, by ${data.replica}`, "ok");
  byId("main").hidden = false;
  if (!drawn) requestAnimationFrame(draw);
  drawn = true;
}

function trouble(text, word = "not live") {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
  byId("main").classList.toggle("stale", Boolean(text));
  if (text) live(word, "bad");
}

function live(text, look) {
  const place = byId("live");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.look = look;
}

// Showing

function draw() {
  drawn = false;
  choosePools();
  const picture = pictures.find((one) => one.pool === byId("pool").value) ?? pictures[0];
  if (!picture) return;
  const history = histories.get(picture.pool);
  const { nodes, active, capacity } = picture.total;
  const unwell = picture.nodes.filter((node) => lookOf(node) !== "ok").length;
  byId("totals").textContent =
    `${nodes} ${nodes === 1 ? "node" : "nodes"}, ${unwell || "none"} not ok · ${active} / ${capacity} in flight`;
  cards.draw(picture.nodes);
  byId("more").textContent = `${nodes - picture.nodes.length} more, less busy and well, are not shown.`;
  byId("more").hidden = nodes === picture.nodes.length;
  for (const chart of charts) chart.draw(history);
  byId("charted").textContent = `The charts follow ${history.drawn.length} of ${nodes} nodes.`;
  byId("charted").hidden = history.drawn.length >= nodes;
  drawTimeline(byId("timeline"), history);
  drawChanges(history);
  drawReplicas(picture.replicas);
}

function choosePools() {
  const names = pictures.map((one) => one.pool);
  const select = byId("pool");
  byId("pool-choice").hidden = names.length < 2;
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => element("option", "", name)));
  if (names.includes(before)) select.value = before;
}

// Only what is new is put in, so that only that is read out.
function drawChanges(history) {
  const list = byId("changes");
  if (listed.history !== history) {
    listed = { history, noted: 0 };
    list.replaceChildren();
  }
  list.prepend(...history.changes.slice(0, history.noted - listed.noted).map(changeLine));
  listed.noted = history.noted;
  while (list.childElementCount > history.changes.length) list.lastElementChild.remove();
  byId("quiet").hidden = history.noted > 0;
}

function changeLine(one) {
  const line = element("li");
  line.dataset.look = one.look;
  line.append(element("time", "", clock(one.at)), element("b", "", one.id), element("span", "", one.text));
  return line;
}

function drawReplicas(replicas) {
  byId("replicas").tBodies[0].replaceChildren(
    ...replicas.map((one) => {
      const row = element("tr");
      const silent = one.expires_in_s <= 0;
      row.dataset.look = silent ? "bad" : "ok";
      const name = element("th", "", one.replica);
      name.scope = "row";
      row.append(name, element("td", "", `${one.leases}`), element("td", "", silent ? "silent" : "beats"));
      return row;
    }),
  );
}

// The key

const key = () => sessionStorage.getItem(KEY);

function askForKey(refused) {
  const form = byId("key-form");
  const given = key();
  sessionStorage.removeItem(KEY);
  byId("forget").hidden = true;
  byId("main").hidden = true;
  trouble("");
  live("locked", "warn");
  byId("key-why").textContent = given ? refused.message : "This gateway shows its nodes to admins.";
  form.hidden = false;
  byId("key").focus();
  return new Promise((done) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key").value.trim());
      byId("key").value = "";
      byId("forget").hidden = false;
      form.hidden = true;
      done();
    }, { once: true });
  });
}

byId("forget").hidden = !key();
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

// Changes of nodes

async function change(node) {
  const drain = node.state === "active";
  if (drain && !(await sure(node))) return;
  say("");
  try {
    const path = `admin/nodes/${encodeURIComponent(node.id)}/${drain ? "drain" : "enable"}`;
    await good(await fetch(path, { method: "POST", headers: withKey(key()) }));
  } catch (fault) {
    say(`${node.id} is not ${drain ? "drained" : "enabled"}: ${fault.message}`);
  }
}

let fading;
function say(refused) {
  clearTimeout(fading);
  byId("refused").textContent = refused;
  byId("refused").hidden = !refused;
  if (refused) fading = setTimeout(say, 20_000, "");
}

function sure(node) {
  const dialog = byId("ask");
  byId("ask-title").textContent = `Drain ${node.id}?`;
  byId("ask-what").textContent =
    `No new request goes to it. The ${node.active} that run on it end in peace.`;
  byId("ask-yes").textContent = "Drain";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}

byId("pool").addEventListener("change", draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
follow();
