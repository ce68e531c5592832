// The `openai` package of npm, on Node: prints the same lines as the Python scripts.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import OpenAI, { APIError, toFile } from "openai";

const url = process.argv[2].replace(/\/$/, "");
const model = process.env.CLIENT_MODEL ?? "demo";
const sdk = new OpenAI({
  baseURL: `${url}/v1`,
  apiKey: process.env.CLIENT_KEY,
  maxRetries: 0,
  timeout: 60_000,
});

const HELLO = "Say something about rivers.";
const ask = [{ role: "user", content: HELLO }];
const schema = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "weather", parameters: schema, strict: true } };
const wanted = {
  type: "json_schema",
  json_schema: { name: "weather", schema, strict: true },
};
const upload = () => toFile(Buffer.alloc(50_000, "abcdefg"), "speech.wav");

async function collect(stream, pick) {
  const kept = [];
  for await (const event of stream) kept.push(pick(event));
  return kept;
}

// What an error says, as an application would see it.
async function raised(call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
    return { raised: error.constructor.name, status: error.status, code: error.code ?? null };
  }
  throw new Error("no error");
}

const calls = {
  "models.list": async () => (await collect(await sdk.models.list(), (m) => m.id)).sort(),
  "chat.completions": async () => {
    const answer = await sdk.chat.completions.create({ model, messages: ask, max_tokens: 20 });
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage];
  },
  "chat.completions, stream": async () =>
    collect(
      await sdk.chat.completions.create({ model, messages: ask, max_tokens: 20, stream: true }),
      (chunk) => [chunk.choices[0].delta, chunk.choices[0].finish_reason, chunk.usage ?? null],
    ),
  "chat.completions, stream with usage": async () =>
    collect(
      await sdk.chat.completions.create({
        model,
        messages: ask,
        max_tokens: 5,
        stream: true,
        stream_options: { include_usage: true },
      }),
      (chunk) => [chunk.choices.length, chunk.usage ?? null],
    ),
  "chat.completions, stream helper": async () => {
    const stream = sdk.chat.completions.stream({ model, messages: ask });
    return [await stream.finalContent(), (await stream.finalChatCompletion()).choices.length];
  },
  "chat.completions, stream aborted after three events": async () => {
    const stream = await sdk.chat.completions.create({
      model,
      messages: ask,
      max_tokens: 1_000_000,
      stream: true,
    });
    const seen = [];
    for await (const chunk of stream) {
      seen.push(chunk.choices[0].delta.content);
      if (seen.length === 3) break; // the SDK aborts the request
    }
    return seen;
  },
  "chat.completions, tools": async () => {
    const answer = await sdk.chat.completions.create({ model, messages: ask, tools: [tool] });
    return [answer.choices[0].finish_reason, answer.choices[0].message.tool_calls];
  },
  "chat.completions, tools, stream": async () => {
    const stream = sdk.chat.completions.stream({ model, messages: ask, tools: [tool] });
    return (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  },
  "chat.completions, parse": async () => {
    const answer = await sdk.chat.completions.parse({
      model,
      messages: ask,
      response_format: wanted,
    });
    return JSON.parse(answer.choices[0].message.content);
  },
  completions: async () =>
    (await sdk.completions.create({ model, prompt: HELLO, max_tokens: 12 })).choices[0].text,
  "completions, stream": async () =>
    collect(
      await sdk.completions.create({ model, prompt: HELLO, max_tokens: 12, stream: true }),
      (chunk) => chunk.choices[0].text,
    ),
  embeddings: async () =>
    (await sdk.embeddings.create({ model, input: ["a", "b"], dimensions: 8 })).data.map((row) =>
      row.embedding.map((number) => Number(number.toFixed(6))),
    ),
  responses: async () => {
    const answer = await sdk.responses.create({ model, input: HELLO, max_output_tokens: 16 });
    return [answer.status, answer.output_text, answer.usage.output_tokens];
  },
  "responses, stream": async () =>
    collect(
      await sdk.responses.create({ model, input: HELLO, max_output_tokens: 16, stream: true }),
      (event) => [event.type, event.delta ?? null],
    ),
  "audio.transcriptions": async () =>
    (await sdk.audio.transcriptions.create({ model, file: await upload() })).text,
  "audio.transcriptions, stream": async () =>
    collect(
      await sdk.audio.transcriptions.create({ model, file: await upload(), stream: true }),
      (event) => event,
    ),
  "audio.speech, wav": async () => {
    const answer = await sdk.audio.speech.create({
      model,
      input: HELLO,
      voice: "alloy",
      response_format: "wav",
    });
    const bytes = Buffer.from(await answer.arrayBuffer());
    return [bytes.length, createHash("sha256").update(bytes).digest("hex").slice(0, 16)];
  },
  "error: unknown model": () =>
    raised(() => sdk.chat.completions.create({ model: "nobody-has-it", messages: ask })),
  "error: unknown model, stream": () =>
    raised(() =>
      sdk.chat.completions.create({ model: "nobody-has-it", messages: ask, stream: true }),
    ),
  "error: bad parameter": () =>
    raised(() => sdk.chat.completions.create({ model, messages: ask, max_tokens: -1 })),
  "error: wrong key": () =>
    raised(() => sdk.withOptions({ apiKey: "sk-wrong" }).models.list()),
};

const installed = new URL("./node_modules/openai/package.json", import.meta.url);
const { version } = JSON.parse(readFileSync(installed, "utf8"));
console.log(JSON.stringify({ client: "openai (npm)", version: `${version}, Node ${process.versions.node}` }));
for (const [call, make] of Object.entries(calls)) {
  let line;
  try {
    line = { call, result: "ok", detail: await make() };
  } catch (error) {
    line = { call, result: "error", detail: `${error.constructor.name}: ${error.message}`.slice(0, 400) };
  }
  console.log(JSON.stringify(line));
}
