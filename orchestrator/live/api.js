// Asking the service. The token stays in this tab: it comes from the address's fragment, which no server sees, or is pasted.

const KEY = "dmuon-token";

export function takeTokenFromAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const token = fields.get("token");
  if (!token) return;
  sessionStorage.setItem(KEY, token);
  fields.delete("token");
  const rest = fields.toString();
  history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function check(answer) {
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  const details = (problem.errors || []).map((each) => each.message).join("; ");
  throw new Refused(answer.status, [problem.detail || problem.title || answer.statusText, details].filter(Boolean).join(": "));
}

export async function get(path) {
  return (await check(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function send(method, path, body) {
  const more = { "Content-Type": "application/json", "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
  const options = { method, headers: headers(more), body: body === undefined ? undefined : JSON.stringify(body) };
  return (await check(await fetch(path, options))).json();
}

// Follows the events of a job until `signal` aborts or the job ends; a broken stream begins again after the last event.
export async function follow(jobId, onEvent, signal) {
  let last = 0;
  while (!signal.aborted) {
    try {
      const answer = await check(await fetch(`/v1/jobs/${jobId}/events`, {
        headers: headers({ Accept: "text/event-stream", "Last-Event-ID": String(last) }), signal, cache: "no-store",
      }));
      for await (const event of read(answer.body)) {
        if (event.kind === "end" && JSON.parse(event.data).state) return;
        if (event.kind === "end") break; // the server is going down: ask again
        const found = JSON.parse(event.data);
        last = found.seq;
        onEvent(found);
      }
    } catch (error) {
      if (signal.aborted || (error instanceof Refused && [401, 403, 404].includes(error.status))) return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

async function* read(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value.replaceAll("\r", "");
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = { kind: "message", data: "" };
      for (const line of rest.slice(0, end).split("\n")) {
        if (line.startsWith("event:")) event.kind = line.slice(6).trim();
        else if (line.startsWith("data:")) event.data += line.slice(5).trim();
      }
      rest = rest.slice(end + 2);
      if (event.data) yield event;
    }
  }
}
