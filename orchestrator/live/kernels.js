// Kernels, their breakers, and what an operator can do: trip, force, reset, swap. Each needs a reason and a yes.

import { get, send } from "./api.js";
import { at, h, pill, put, short, toast } from "./dom.js";

const FALLBACK = "cublas";
const rows = new Map();
let view = 0; // counts the jobs that were looked at
let known = null; // all kernels, once the planner has said which can run

export async function lookAtBreakers(jobId) {
  if (known === null) {
    known = [];
    get("/v1/kernels").then(({ kernels }) => { known = kernels; fillTargets(); })
      .catch((error) => { known = null; toast(`Kernels: ${error.message}`); });
  }
  const names = known.length ? known.filter((each) => each.breaker !== null).map((each) => each.kernel) : [...rows.keys()].filter((name) => name !== FALLBACK);
  const found = await Promise.all(names.map((name) => get(`/v1/kernels/${name}/breaker`)));
  return Object.fromEntries(found.map((each) => [each.kernel, stateFor(each, jobId)]));
}

// The word for this job, else the word for all; where that leaves the kernel running, what moved by itself since.
function stateFor(breaker, jobId) {
  const own = breaker.jobs[jobId];
  const word = own ? breaker.history.find((each) => each.scope === jobId) : breaker;
  const state = own ?? breaker.state;
  const moved = breaker.runtime.find((each) => each.job === jobId);
  if (state === "closed" && moved) return { state: moved.state, why: `by itself at step ${moved.step}: ${moved.reason}` };
  return { state, why: word?.reason ? `${word.actor}: ${word.reason}` : "" };
}

// Of a baseline, whose kernels are torch's, there is nothing to operate; null: not known yet.
export function showOptimizer(kind) {
  const operated = kind === null || kind === "dmuon";
  at("kernel-table").hidden = at("swap-line").hidden = !operated;
  if (!operated) put(at("kernel-now"), `This job trains with torch's own ${kind}: it launches none of these kernels, and no breaker acts on it.`);
  return operated;
}

export function showKernels(job, last, launching, breakers) {
  const totals = {};
  for (const part of last?.ns ?? []) totals[part.kernel] = (totals[part.kernel] ?? 0) + part.launches;
  const current = job.state === "RUNNING" && last?.attempt === job.attempts.at(-1)?.number; // else the last step is an earlier attempt's
  const now = new Set(current ? launching.map((part) => part.kernel) : []);
  const names = [...new Set([...Object.keys(totals), ...Object.keys(breakers), FALLBACK])].sort();
  for (const name of names) {
    if (!rows.has(name)) rows.set(name, makeRow(name, job));
    const row = rows.get(name);
    const breaker = breakers[name];
    put(row.launched, `${short(totals[name] ?? 0)}${now.has(name) ? " · running now" : ""}`);
    row.node.dataset.running = String(now.has(name));
    if (breaker) {
      pill(row.state, breaker.state);
      put(row.why, breaker.why);
      const tries = ["open", "half_open"].includes(breaker.state); // by itself, and will run the kernel again by itself
      row.trip.disabled = tries || breaker.state === "forced_open";
      row.force.disabled = !tries;
      row.reset.disabled = breaker.state === "closed";
    }
  }
  const text = launching.map((part) => `${part.kernel} (${part.algorithm}), ${part.launches} launches`).join(", ");
  put(at("kernel-now"), last ? `Launched in step ${last.step}: ${text || "nothing"}` : "Nothing was launched yet.");
  at("swap").disabled = job.state !== "RUNNING";
}

export function forgetRows() { view += 1; rows.clear(); at("kernels").replaceChildren(); put(at("swap-state"), ""); }

function makeRow(name, job) {
  const launched = h("td", { class: "num", "data-label": "Launched" });
  const state = h("span", { class: "pill" });
  const why = h("span", { class: "why" });
  const cells = name === FALLBACK
    ? [h("td", { class: "quiet" }, "is the fallback"), h("td")]
    : [h("td", { "data-label": "Breaker" }, state, " ", why), h("td")];
  const [trip, force, reset] = Object.entries(WORDS).map(([action, [word]]) =>
    h("button", { type: "button", "aria-label": `${word} ${name}`, onclick: () => change(name, action, job) }, word));
  if (name !== FALLBACK) cells[1].append(h("span", { class: "actions" }, trip, force, reset));
  const node = h("tr", { "data-kernel": name }, h("th", { scope: "row" }, name), launched, ...cells);
  at("kernels").append(node);
  return { node, launched, state, why, trip, force, reset };
}

const WORDS = {
  trip: ["Trip", "The work of this kernel goes to the fallback from the next step on. The job goes on."],
  force: ["Force", "Its breaker opened by itself and tries the kernel again by itself. Forced, it stays open until somebody resets it."],
  reset: ["Reset", "The kernel runs again from the next step on, and may trip again."],
};

async function change(kernel, action, job) {
  const ended = job.finished_at !== null;
  const [word, text] = WORDS[action];
  const said = await ask({ title: `${word} ${kernel}?`, text, yes: `${word} ${kernel}`, scope: ended ? null : "job" });
  if (!said) return;
  const scope = ended || said.scope === "all" ? "all" : job.id;
  await attempt(() => send("PUT", `/v1/kernels/${kernel}/breaker`, { action, reason: said.reason, scope }), `${word} of ${kernel} was taken`);
}

export async function swapKernel(job) {
  const mine = view;
  const said = await ask({
    title: "Swap the kernel of this job?", yes: "Swap", target: true,
    text: "All ranks prepare beside their steps and change at one step, or none does and the reason is shown here.",
  });
  if (!said) return;
  const wanted = Object.fromEntries(Object.entries(said.target).filter(([, value]) => value));
  if (!Object.keys(wanted).length) return toast("Nothing was chosen: swap a kernel, an algorithm or coefficients.");
  const swap = await attempt(() => send("POST", `/v1/jobs/${job.id}/kernel-swaps`, { ...wanted, reason: said.reason }));
  if (swap) watch(job.id, swap, mine);
}

// Until the swap has ended or another job is looked at: how long ranks may prepare is the spec's own.
async function watch(jobId, swap, mine) {
  const target = Object.values(swap.target).filter(Boolean).join(", ");
  while (view === mine) {
    const where = swap.step === null ? "" : ` at step ${swap.step}, epoch ${swap.epoch}`;
    put(at("swap-state"), `Swap to ${target}: ${swap.state}${where}. ${swap.message}`);
    if (["committed", "rolled_back", "failed"].includes(swap.state)) return;
    await new Promise((done) => setTimeout(done, 500));
    swap = await get(`/v1/jobs/${jobId}/kernel-swaps/${swap.id}`).catch(() => swap); // the page says that nobody answers
  }
}

export async function attempt(work, done) {
  try {
    const answer = await work();
    if (done) toast(done);
    return answer;
  } catch (error) {
    toast(error.message);
    return null;
  }
}

function fillTargets() {
  at("target-kernel").replaceChildren(h("option", { value: "" }, "as it is"), ...known.map((each) =>
    h("option", { value: each.kernel }, each.available === false ? `${each.kernel} (cannot run where plans are made)` : each.kernel)));
}

// Resolves to what was said, or null when it was left.
export function ask({ title, text, yes, scope = null, target = false, reason = true }) {
  const dialog = at("confirm");
  put(at("confirm-title"), title);
  put(at("confirm-text"), text);
  put(at("confirm-yes"), yes);
  at("confirm-scope").hidden = scope === null;
  at("confirm-target").hidden = !target;
  at("confirm-reason-label").hidden = !reason;
  at("confirm-reason").required = reason;
  at("confirm-reason").value = "";
  for (const part of ["kernel", "algorithm", "coefficients"]) at(`target-${part}`).value = "";
  if (scope) dialog.querySelector(`input[name="scope"][value="${scope}"]`).checked = true;
  at("confirm-no").onclick = () => dialog.close("no");
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue !== "yes" ? null : {
      reason: at("confirm-reason").value.trim(), scope: dialog.querySelector('input[name="scope"]:checked').value,
      target: Object.fromEntries(["kernel", "algorithm", "coefficients"].map((part) => [part, at(`target-${part}`).value])),
    }), { once: true });
  });
}
