// Server-sent events over fetch: EventSource cannot send a key.

const SILENCE_MS = 15_000; // the gateway speaks every second, or every few when Redis is slow

/** The gateway said no. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Headers that carry the key, if there is one. */
export function withKey(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The answer if it is a good one; throws Refused with the gateway's own words. */
export async function good(answer) {
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `${answer.status} ${answer.statusText}`);
}

/** Yields {name, data} of every event until the gateway ends the stream. */
export async function* events(url, key) {
  const abort = new AbortController();
  let silent;
  const heard = () => {
    clearTimeout(silent);
    silent = setTimeout(() => abort.abort(new Error("the gateway has gone silent")), SILENCE_MS);
  };
  heard();
  try {
    const answer = await good(
      await fetch(url, { headers: withKey(key), signal: abort.signal, cache: "no-store" }),
    );
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) yield parsed(part);
    }
  } finally {
    clearTimeout(silent);
    abort.abort();
  }
}

// What this gateway sends: one `event:` line and one `data:` line of JSON.
function parsed(text) {
  const fields = Object.fromEntries(
    text.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]),
  );
  return { name: fields.event, data: JSON.parse(fields.data) };
}
