// The live page: which job is chosen, and when to look again.

import { follow, get, Refused, send, setToken, takeTokenFromAddress } from "./api.js";
import { Chart } from "./charts.js";
import { at, put, toast } from "./dom.js";
import { ask, attempt, forgetRows, lookAtBreakers, showKernels, showOptimizer, swapKernel } from "./kernels.js";
import { Series } from "./series.js";
import { addEvent, showJob, showJobs, showOverlap, showOwners } from "./views.js";

const PAGE = 2000;
const charts = { loss: new Chart(at("chart-loss"), "loss", 3), speed: new Chart(at("chart-speed"), "tokens a second", 3) };
let chosen = null; // { id, series, job, breakers, optimizer, stream }

function choose(id) {
  if (chosen?.id === id) return;
  chosen?.stream.abort();
  chosen = { id, series: new Series(), job: null, breakers: {}, optimizer: null, stream: new AbortController() };
  at("events").replaceChildren();
  forgetRows();
  for (const chart of Object.values(charts)) chart.draw([], []);
  history.replaceState(null, "", `#job=${id}`);
  const mine = chosen;
  follow(id, (event) => { if (chosen === mine) { addEvent(event); soon(); } }, chosen.stream.signal);
  tick();
}

async function lookAtJobs() {
  const { jobs } = await get("/v1/jobs?page_size=50");
  if (chosen === null && jobs.length) {
    const asked = new URLSearchParams(location.hash.slice(1)).get("job");
    choose(asked ?? (jobs.find((job) => job.state === "RUNNING") ?? jobs[0]).id);
  }
  showJobs(jobs, chosen?.id, choose);
}

async function lookAtJob() {
  const mine = chosen;
  if (mine === null) return;
  const job = await get(`/v1/jobs/${mine.id}`);
  let more = PAGE;
  while (more === PAGE || more < 0) {
    const after = mine.series.cursor(job.progress.step);
    more = mine.series.add(await get(`/v1/jobs/${mine.id}/metrics?after=${after}&limit=${PAGE}`), job.plan?.world_size ?? 1);
    if (chosen !== mine) return;
  }
  mine.job = job;
  showJob(job, mine.series.last);
  charts.loss.draw(mine.series.steps, mine.series.losses);
  charts.speed.draw(mine.series.steps, mine.series.speeds);
  showOverlap(mine.series.recent(), mine.optimizer);
  if (showOptimizer(mine.optimizer)) showKernels(job, mine.series.last, mine.series.launchedNow(), mine.breakers);
}

async function lookBeside() {
  const mine = chosen;
  if (mine?.job == null) return;
  const breakers = await lookAtBreakers(mine.id);
  const routes = mine.job.plan ? await get(`/v1/jobs/${mine.id}/routes`) : null;
  if (chosen !== mine) return;
  mine.breakers = breakers;
  mine.optimizer = routes?.optimizer ?? null;
  showOwners(routes);
}

const beats = [
  { every: 3, work: lookAtJobs },
  { every: 1, work: lookAtJob },
  { every: 2, work: lookBeside },
];
let beat = 0;
let busy = false;
let again = false;

async function tick() {
  if (busy) { again = true; return; }
  busy = true;
  const all = again;
  again = false;
  try {
    for (const { every, work } of beats) if (all || beat % every === 0) await work();
    put(at("service"), "live");
    at("service").className = "quiet good";
  } catch (error) {
    sayWhatIsWrong(error);
  } finally {
    busy = false;
  }
}

function sayWhatIsWrong(error) {
  if (error instanceof Refused && error.status === 401) return askForToken();
  if (error instanceof Refused && error.status === 404 && chosen) { toast(error.message); chosen.stream.abort(); chosen = null; location.hash = ""; return; }
  put(at("service"), error instanceof Refused ? error.message : "the service does not answer; trying again");
  at("service").className = "quiet bad";
}

// An event came: look now, but many events at once are one look.
let waiting = null;
function soon() {
  waiting ??= setTimeout(() => { waiting = null; again = true; tick(); }, 150);
}

function askForToken(why = "") {
  const dialog = at("token-dialog");
  if (dialog.open) return;
  put(at("service"), "a token is needed");
  put(at("token-error"), why);
  at("token-input").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "ok") return;
    setToken(at("token-input").value.trim());
    again = true;
    tick();
  }, { once: true });
}

const THEMES = ["auto", "light", "dark"];
const darkened = matchMedia("(prefers-color-scheme: dark)");

function dress() {
  const wanted = localStorage.getItem("dmuon-theme") ?? "auto";
  document.documentElement.dataset.theme = wanted === "auto" ? (darkened.matches ? "dark" : "light") : wanted;
  put(at("theme"), `Theme: ${wanted}`);
  for (const chart of Object.values(charts)) chart.retint();
}

at("theme").addEventListener("click", () => {
  const now = localStorage.getItem("dmuon-theme") ?? "auto";
  localStorage.setItem("dmuon-theme", THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  dress();
});
darkened.addEventListener("change", dress);
at("token").addEventListener("click", () => askForToken());
at("swap").addEventListener("click", () => chosen?.job && swapKernel(chosen.job).then(soon));

const DEEDS = {
  cancel: ["Cancel the job?", "stops gracefully and its room is freed. This cannot be undone.", "Cancel the job"],
  pause: ["Pause the job?", "saves a checkpoint, stops and frees its room, until somebody resumes it.", "Pause the job"],
  resume: ["Resume the job?", "goes back into the queue and continues from its newest checkpoint.", "Resume the job"],
};
for (const [deed, [title, text, yes]] of Object.entries(DEEDS)) {
  at(deed).addEventListener("click", async () => {
    if (!chosen?.job) return;
    const { id, job } = chosen;
    if (await ask({ title, text: `${job.name} ${text}`, yes, reason: false })) {
      await attempt(() => send("POST", `/v1/jobs/${id}:${deed}`), `${deed}: it was taken`);
      soon();
    }
  });
}
addEventListener("hashchange", () => {
  takeTokenFromAddress();
  const asked = new URLSearchParams(location.hash.slice(1)).get("job");
  if (asked) choose(asked);
});

takeTokenFromAddress();
dress();
tick();
setInterval(() => { if (!document.hidden) { beat += 1; tick(); } }, 1000);
