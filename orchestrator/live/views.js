// What is seen of the chosen job. Each function brings one part of the page up to date.

import { at, bar, h, percent, pill, put, short } from "./dom.js";
import { overlapOf } from "./series.js";

const LOW = 0.5;

export function showJobs(jobs, chosen, choose) {
  at("no-jobs").hidden = jobs.length > 0;
  const list = at("jobs");
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.job : null;
  list.replaceChildren(...jobs.map((job) => {
    const why = [job.reason, job.message].filter(Boolean).join(": ");
    const button = h("button", { type: "button", "data-job": job.id, onclick: () => choose(job.id) },
      h("span", { class: "name" }, job.name), pill(h("span"), job.state), h("span", { class: "why" }, `${job.id} ${why}`));
    if (job.id === chosen) button.setAttribute("aria-current", "true");
    return h("li", {}, button);
  }));
  if (focused) list.querySelector(`[data-job="${CSS.escape(focused)}"]`)?.focus();
}

export function showJob(job, last) {
  at("empty").hidden = true;
  at("job").hidden = false;
  put(at("job-name"), job.name);
  const attempts = job.attempts.length;
  put(at("job-line"), `${job.id} · project ${job.project} · attempt ${attempts || "–"} · ${job.plan?.world_size ?? "?"} workers`);
  pill(at("job-state"), job.state);
  put(at("job-message"), [job.reason, job.message].filter(Boolean).join(": "));
  at("job-message").hidden = !at("job-message").textContent;
  at("cancel").hidden = job.finished_at !== null;
  at("pause").hidden = !["QUEUED", "STARTING", "RUNNING", "RESTARTING"].includes(job.state);
  at("resume").hidden = job.state !== "PAUSED";
  const { step, steps } = job.progress;
  at("progress").value = steps ? step / steps : 0;
  const loss = last?.loss ?? job.progress.loss;
  const tiles = {
    Step: `${step} / ${steps}`,
    Loss: short(loss, 4),
    "Tokens a second": short(job.progress.tokens_per_second),
    Overlap: percent(job.progress.overlap_ratio),
    "Gradient norm": short(last?.grad_norm),
    "Skipped steps": String(job.progress.skipped_steps),
  };
  const box = at("tiles");
  for (const [name, value] of Object.entries(tiles)) {
    let dd = box.querySelector(`[data-tile="${name}"]`);
    if (!dd) {
      dd = h("dd", { "data-tile": name });
      box.append(h("div", {}, h("dt", {}, name), dd));
    }
    put(dd, value);
    const ill = (name === "Loss" && loss !== null && !Number.isFinite(Number(loss))) || (name === "Skipped steps" && value !== "0");
    dd.className = ill ? "bad" : "";
  }
  showVerdict(job.conditions.find((each) => each.type === "RoutesVerified"));
}

function showVerdict(condition) {
  const note = at("verified");
  note.hidden = !condition;
  if (!condition) return;
  const good = condition.status === "True";
  note.className = `note ${good ? "good" : "bad"}`;
  put(note, `${good ? "What ran is what was planned" : "ALARM: what ran is not what was planned"}: ${condition.message}`);
}

export function showOverlap(recent, optimizer) {
  const box = at("overlap");
  if (!recent || !recent.comm.length) {
    put(at("overlap-window"), "in the last steps");
    const measured = optimizer === null || optimizer === "dmuon";
    box.replaceChildren(h("p", { class: "quiet" }, measured ? "Nothing was communicated yet." : "Not known: torch measures none of what a baseline communicates."));
    return;
  }
  put(at("overlap-window"), `in the last ${recent.steps} steps`);
  const routes = [...new Set(recent.comm.map((part) => part.route))].sort();
  box.replaceChildren(...routes.flatMap((route) => {
    const parts = recent.comm.filter((part) => part.route === route);
    return [overlapLine(route, parts, ""), ...parts.map((part) => overlapLine(part.phase, [part], "sub"))];
  }));
}

function overlapLine(what, parts, kind) {
  const { seconds, exposed, share } = overlapOf(parts);
  const line = h("div", { class: `bar-line ${kind}`, "data-overlap": what }, h("span", { class: "what" }, what),
    bar(share, share !== null && share < LOW ? "low" : ""), h("span", { class: "figure" }, percent(share)));
  if (!kind) line.append(h("span", { class: "fine" }, `${short(exposed)} s of ${short(seconds)} s exposed, over all ranks`));
  return line;
}

export function showOwners(routes) {
  const box = at("owners");
  if (!routes || !routes.ranks.length) {
    box.replaceChildren(h("p", { class: "quiet" }, "No owners: the job has no plan yet, or trains with a baseline."));
    return;
  }
  const worst = routes.ranks.reduce((a, b) => ((b.measured_share ?? 0) > (a.measured_share ?? 0) ? b : a));
  const most = Math.max(...routes.ranks.flatMap((rank) => [rank.planned_share, rank.measured_share ?? 0]), 0.01);
  const lines = routes.ranks.flatMap((rank) => [
    h("div", { class: "bar-line" }, h("span", { class: "what" }, `rank ${rank.rank} planned`),
      bar(rank.planned_share / most, "second"), h("span", { class: "figure" }, percent(rank.planned_share))),
    h("div", { class: "bar-line" }, h("span", { class: "what" }, `rank ${rank.rank} measured`),
      bar((rank.measured_share ?? 0) / most), h("span", { class: "figure" }, percent(rank.measured_share))),
  ]);
  const seconds = worst.compute_seconds;
  const named = seconds === null ? "" : `Most time: rank ${worst.rank}, ${short(seconds)} s, ${percent(worst.measured_share)}` +
    ` where ${percent(worst.planned_share)} was planned.`;
  box.replaceChildren(h("p", {}, named), ...lines);
}

export function addEvent(event) {
  const list = at("events");
  const when = new Date(event.at * 1000);
  list.prepend(h("li", { "data-kind": event.kind },
    h("time", { datetime: when.toISOString() }, when.toLocaleTimeString()),
    h("span", { class: "kind" }, event.kind), h("span", { class: "said" }, event.message)));
  while (list.children.length > 300) list.lastChild.remove();
}
