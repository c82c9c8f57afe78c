// A client of Tandem in Node.js: streams, cancels, shows errors with their status, and goes on when its orchestrator is
// lost. `generate` is all that an application needs; what follows it is a command line.

import { readFileSync } from "node:fs";
import process from "node:process";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath, pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
// 64-bit numbers, such as seeds, are more than a JavaScript number can hold: they are strings here.
const definition = protoLoader.loadSync("tandem/orchestrator/v1/orchestrator.proto", {
  includeDirs: [PROTOS],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { OrchestratorService } = grpc.loadPackageDefinition(definition).tandem.orchestrator.v1;

const CHANNEL_OPTIONS = {
  "grpc.keepalive_time_ms": 20_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.enable_http_proxy": 0,
};
const FIRST_WAIT_MS = 100;
const LONGEST_WAIT_MS = 3_000;

/**
 * The events of one GenerateRequest as they come: `started`, then chunks, and a `complete` for each answer.
 *
 * UNAVAILABLE, or CANCELLED that nobody asked for, is asked again, of the next address, with what has arrived: nothing
 * comes twice, and under the policies `greedy` and `coupled` the tokens are those of an answer that was never cut off.
 * Every other status is thrown, as are these after `tries` calls in a row without a token. `signal` cancels, and so does leaving the loop: the services
 * forget the request within a round. `authority`: a Buffer of PEM certificates, for TLS. `token`: sent with every call,
 * in clear text to this machine only.
 */
export async function* generate(addresses, request, { signal, tries = 12, authority, token } = {}) {
  const reach = reaching(addresses, authority, token);
  const arrived = new Map(); // token ids by sample index
  const told = new Set(); // what is said once, though every call says it
  let failures = 0;
  for (let number = 0; ; number++) {
    try {
      for await (const message of call(addresses[number % addresses.length], request, reach, signal)) {
        if (message.event === "started") {
          const { seed, numerics } = message.started;
          request = { ...request, numerics, sampling: { ...request.sampling, seed } };
        } else if (message.event === "chunk") {
          const { sample_index: index, token_ids: ids } = message.chunk;
          arrived.set(index, [...(arrived.get(index) ?? []), ...ids]);
          failures = 0;
        }
        const once = message.event === "chunk" ? null : `${message.event} ${message.complete?.sample_index}`;
        if (!told.has(once)) yield message;
        if (once) told.add(once);
      }
      return;
    } catch (error) {
      failures += 1;
      // CANCELLED, where nobody has: a server that stops listening says so of calls that it had not taken yet.
      const isUntaken = error.code === grpc.status.CANCELLED && !signal?.aborted;
      if ((error.code !== grpc.status.UNAVAILABLE && !isUntaken) || failures >= tries) throw error;
    }
    const resume = [...arrived].map(([sample_index, token_ids]) => ({ sample_index, token_ids }));
    request = { ...request, resume };
    const wait = Math.min(FIRST_WAIT_MS * 2 ** (failures - 1), LONGEST_WAIT_MS);
    await sleep(wait * (0.5 + Math.random()), undefined, { signal });
  }
}

/** How the addresses are called. */
function reaching(addresses, authority, token) {
  const metadata = new grpc.Metadata();
  if (token) metadata.set("authorization", `Bearer ${token}`);
  if (authority) return { credentials: grpc.credentials.createSsl(authority), metadata };
  const overheard = addresses.find((address) => !/^(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d+$/.test(address));
  if (token && overheard) throw new Error(`the token would travel in clear text to ${overheard}; TLS needs an authority`);
  return { credentials: grpc.credentials.createInsecure(), metadata };
}

/** The messages of one call; it is cancelled when they are not read to the end. */
async function* call(address, request, { credentials, metadata }, signal) {
  signal?.throwIfAborted();
  const client = new OrchestratorService(address, credentials, CHANNEL_OPTIONS);
  const stream = client.Generate(request, metadata);
  const cancel = () => stream.cancel();
  stream.on("error", () => {}); // thrown by the loop below; one that comes after it is nobody's
  signal?.addEventListener("abort", cancel, { once: true });
  try {
    yield* stream;
  } finally {
    signal?.removeEventListener("abort", cancel);
    cancel();
    client.close();
  }
}

const OPTIONS = {
  address: { type: "string", default: "127.0.0.1:50050", about: "HOST:PORT,... of orchestrators with the same models" },
  seed: { type: "string", about: "the same seed gives the same text; default: drawn" },
  temperature: { type: "string", about: "0: greedy; default: 1" },
  "max-tokens": { type: "string", about: "most tokens of an answer" },
  "ignore-eos": { type: "boolean", default: false, about: "go on past the end token" },
  n: { type: "string", about: "this many answers, each under its sample index once all have ended" },
  tries: { type: "string", default: "12", about: "calls in a row without a token until UNAVAILABLE is an error" },
  "cancel-after": { type: "string", about: "cancel after so many chunks" },
  json: { type: "boolean", default: false, about: "every event as a line of JSON, as it comes" },
  "tls-ca": { type: "string", about: "call with TLS: a file of PEM certificates; the token is that of TANDEM_TOKEN" },
  help: { type: "boolean", short: "h", about: "say this" },
};

function help() {
  const lines = Object.entries(OPTIONS).map(([name, { about, default: value }]) => {
    return `  --${name.padEnd(14)}${about}${value ? `; default: ${value}` : ""}`;
  });
  return ["usage: node client.mjs PROMPT [OPTIONS]", "", ...lines].join("\n");
}

/** What the options say, with what they leave out left to the server. */
function toRequest(text, options) {
  return {
    text,
    n: options.n,
    sampling: { seed: options.seed, temperature: options.temperature },
    stopping: { max_tokens: options["max-tokens"], ignore_eos: options["ignore-eos"] },
  };
}

async function main() {
  const { values: options, positionals } = parseArgs({ options: OPTIONS, allowPositionals: true });
  if (options.help) return console.log(help());
  const cancelling = new AbortController();
  process.once("SIGINT", () => cancelling.abort());
  let numChunks = 0;
  const settings = {
    signal: cancelling.signal,
    tries: Number(options.tries),
    authority: options["tls-ca"] && readFileSync(options["tls-ca"]),
    token: process.env.TANDEM_TOKEN,
  };
  const request = toRequest(positionals.join(" "), options);
  const texts = Number(options.n) > 1 ? new Map() : null; // of several answers, whose chunks come mixed, by sample index
  try {
    for await (const message of generate(options.address.split(","), request, settings)) {
      if (options.json) console.log(JSON.stringify(message));
      else if (message.event === "chunk") show(message.chunk, texts);
      else if (message.event === "complete") console.error(summary(message.complete, texts));
      if (message.event === "chunk" && ++numChunks === Number(options["cancel-after"])) cancelling.abort();
    }
  } finally {
    const answers = [...(texts ?? [])].sort(([one], [other]) => one - other);
    for (const [index, text] of answers) console.log(`answer ${index}:\n${text}`);
  }
}

/** Print a single answer's text as it comes; keep that of several. */
function show({ sample_index: index, text }, texts) {
  if (texts) texts.set(index, (texts.get(index) ?? "") + text);
  else process.stdout.write(text);
}

function summary({ sample_index: index, finish_reason: reason, usage, speculation }, texts) {
  const { num_accepted: accepted, num_draft_tokens: drafts } = speculation;
  return `${texts ? `answer ${index}: ` : "\n"}${usage.num_completion_tokens} tokens, ${reason}; ${accepted} of ${drafts} drafts accepted`;
}

function describe(error) {
  if (error.name === "AbortError") return "CANCELLED";
  if (error.code?.startsWith?.("ERR_PARSE_ARGS_")) return `${error.message}; --help lists the options`;
  return `${grpc.status[error.code] ?? error.name}: ${error.details ?? error.message}`;
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  main().catch((error) => {
    console.error(describe(error));
    process.exitCode = 1;
  });
}
