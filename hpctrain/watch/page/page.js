// The page: asks for the summaries once a second, for curves where they changed, draws on change.

const TOKEN = new URLSearchParams(location.search).get("token") ?? "";
const EVERY = 1000; // milliseconds
const HUES = ["#1f77d0", "#d1651a", "#2a9d4a", "#b5379b", "#c9a100", "#0fa3a3", "#d33f49", "#7a5fd0", "#7f8c1b", "#8c6a4f"];
const SPLITS = { validation: "--orange", test: "--green" };
const find = (query, inside = document) => inside.querySelector(query);

const state = { runs: [], chosen: null, laid: new Set(), curves: new Map(), asked: new Set(), before: "" };

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function hue(run) {
  return HUES[run.key % HUES.length];
}

function short(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  return size === 0 || (size >= 1e-3 && size < 1e5) ? value.toFixed(4) : value.toExponential(2);
}

function clock(seconds) {
  if (seconds === null) return "";
  const all = Math.round(seconds);
  const parts = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const kept = parts[0] ? parts : parts.slice(1);
  return kept.map((part, i) => (i ? String(part).padStart(2, "0") : String(part))).join(":");
}

function percent(share) {
  return share === null ? "" : `${share < 1 ? Math.floor(100 * share + 1e-9) : 100} %`;
}

function count(value) {
  return value === null ? "" : value.toLocaleString("en", { maximumFractionDigits: value >= 100 ? 0 : 1 });
}

function ofAll(value, all) {
  return value === null ? "" : `${count(value)}${all ? ` of ${count(all)}` : ""}`;
}

async function ask(path, extra = {}, options = {}) {
  const query = new URLSearchParams({ ...extra, token: TOKEN });
  const answer = await fetch(`${path}?${query}`, { cache: "no-store", ...options });
  return answer.json();
}

async function tick() {
  try {
    if (document.hidden) return;
    state.runs = (await ask("data")).runs;
    if (!state.runs.some((run) => run.key === state.chosen)) state.chosen = state.runs[0]?.key ?? null;
    await fetchCurves();
    say("", false);
    show();
  } catch (error) {
    say("no answer: has hpctrain watch ended?", true);
  }
}

function say(text, lost) {
  const now = `updated ${new Date().toLocaleTimeString()}`;
  find("#connection").textContent = text || now;
  find("#connection").classList.toggle("lost", lost);
}

function laidOver() {
  return state.runs.filter((run) => run.key === state.chosen || state.laid.has(run.key));
}

async function fetchCurves() {
  const old = laidOver().filter((run) => state.curves.get(run.key)?.version !== run.version);
  const answers = await Promise.all(old.map((run) => ask("curves", { run: run.key })));
  for (const answer of answers) if (answer) state.curves.set(answer.key, answer);
}

function show() {
  const laid = laidOver().map((run) => [run.key, state.curves.get(run.key)?.version]);
  const now = JSON.stringify([state.runs, state.chosen, laid, [...state.asked]]);
  if (now === state.before) return;
  state.before = now;
  const run = state.runs.find((each) => each.key === state.chosen);
  find("#empty").hidden = Boolean(run);
  find("#chosen").hidden = find(".plots").hidden = !run;
  find("#runs").hidden = state.runs.length < 2;
  document.title = run ? `${run.name} ${percent(run.share)} - hpctrain watch` : "hpctrain watch";
  showTable();
  if (run) {
    showRun(run);
    draw();
  }
}

function showTable() {
  const rows = state.runs.map((run) => {
    const row = element("tr", "", run.key === state.chosen ? "chosen" : "");
    const box = element("input");
    box.type = "checkbox";
    box.checked = run.key === state.chosen || state.laid.has(run.key);
    box.disabled = run.key === state.chosen;
    box.dataset.focus = `box${run.key}`;
    box.setAttribute("aria-label", `curves of ${run.name}`);
    box.addEventListener("change", () => {
      if (box.checked) state.laid.add(run.key);
      else state.laid.delete(run.key);
      tick();
    });
    const name = element("button", run.name, "name");
    name.dataset.focus = `name${run.key}`;
    name.addEventListener("click", () => {
      state.chosen = run.key;
      tick();
    });
    const swatch = element("span", "", "swatch");
    swatch.style.background = hue(run);
    const cells = [cell(box), cell(swatch, name), cell(element("span", run.text.length > 24 ? run.status : run.text, run.status))];
    cells[2].title = run.text;
    cells[2].className = "status";
    const epochs = run.epoch === null ? "" : `${run.epoch}${run.epochs ? `/${run.epochs}` : ""}`;
    const numbers = [epochs, percent(run.share), clock(run.seconds_left), short(run.loss), short(run.accuracy), count(run.images_per_second)];
    row.append(...cells, ...numbers.map((text) => element("td", text, "number")), cell(stopButton(run)));
    return row;
  });
  const focus = document.activeElement?.dataset?.focus;
  find("#runs tbody").replaceChildren(...rows);
  if (focus) find(`[data-focus="${focus}"]`)?.focus();
  [...document.querySelectorAll("th")].slice(3).forEach((head) => head.classList.add("number"));
}

function cell(...inside) {
  const made = element("td");
  made.append(...inside);
  return made;
}

function stopButton(run) {
  const button = element("button", state.asked.has(run.key) && run.can_be_stopped ? "Asked" : "Stop", "stop");
  button.dataset.focus = `stop${run.key}`;
  prepareStop(button, run);
  return button;
}

function prepareStop(button, run) {
  button.disabled = !run.can_be_stopped;
  button.title = run.can_be_stopped ? `stop ${run.name} after its next step, saved` : "it has ended or is asked to";
  button.onclick = () => stop(run);
}

async function stop(run) {
  if (!confirm(`Stop ${run.name} after its next step? It is saved and tested.`)) return;
  try {
    const answer = await ask("stop", { run: run.key }, { method: "POST" });
    state.asked.add(run.key);
    await tick();
    say(answer.text, false);
  } catch (error) {
    say("no answer: has hpctrain watch ended?", true);
  }
}

function showRun(run) {
  const box = find("#chosen");
  find("h2", box).textContent = run.name;
  find(".badge", box).textContent = run.text;
  find(".badge", box).className = `badge ${run.status}`;
  prepareStop(find("button.stop", box), run);
  find(".bar", box).hidden = run.share === null;
  find(".filled", box).style.width = `${100 * (run.share ?? 0)}%`;
  const way = [
    run.epoch === null ? "" : `Epoch ${ofAll(run.epoch, run.epochs)}`,
    run.step ? `step ${ofAll(run.step, run.steps)}` : "",
    percent(run.share),
    run.seconds_left === null ? "" : `${clock(run.seconds_left)} left`,
  ];
  find("#way").textContent = way.filter(Boolean).join(" · ");
  find("#facts").replaceChildren(...facts(run).map(([name, text]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", text));
    return pair;
  }));
  find("#notes").replaceChildren(...run.notes.map((note) => element("li", note)));
}

function facts(run) {
  const figures = (one) => [
    one.loss === null ? "" : `loss ${short(one.loss)}`,
    one.accuracy === null ? "" : `accuracy ${short(one.accuracy)}`,
  ].filter(Boolean).join(", ");
  const often = run.slowest_share === null ? "" : ` in ${Math.round(100 * run.slowest_share)} % of steps`;
  const shares = Object.entries(run.percents).map(([name, share]) => `${name} ${share} %`);
  return [
    ["training", figures(run)],
    ...Object.entries(run.evaluations).map(([split, one]) => [split, figures(one)]),
    ["speed", run.images_per_second === null ? "" : `${count(run.images_per_second)} images/s`],
    ["ranks", run.ranks === null ? "" : `${run.ranks}${run.device ? ` (${run.device})` : ""}`],
    ["slowest rank", run.slowest_rank === null ? "" : `${run.slowest_rank}${often}`],
    ["time of a step", run.step_seconds === null ? "" : `${count(1000 * run.step_seconds)} ms`],
    ["where it goes", shares.join(", ")],
    ["network", run.model],
    ["folder", run.folder],
  ].filter(([, text]) => text);
}

function seriesOf(name) {
  const laid = laidOver();
  const factor = name === "accuracy" ? 100 : 1;
  return laid.flatMap((run) => Object.entries(state.curves.get(run.key)?.[name] ?? {}).map(([split, points]) => ({
    split,
    run,
    dots: split !== "training",
    dashed: run.key >= HUES.length,
    color: laid.length > 1 ? hue(run) : split === "training" ? color("--blue") : color(SPLITS[split] ?? "--red"),
    points: points.map(([step, ...values]) => [step, ...values.map((value) => factor * value)]),
  }))).filter((one) => one.points.length);
}

function draw() {
  const colors = { soft: color("--soft"), line: color("--line"), card: color("--card") };
  const several = laidOver().length > 1;
  for (const name of ["loss", "accuracy"]) {
    const series = seriesOf(name);
    const box = find(`#${name}`);
    const run = state.runs.find((each) => each.key === state.chosen);
    box.hidden = name === "accuracy" && !series.length && run.step > 0;
    find(".legend", box).replaceChildren(...series.filter((one) => !several || !one.dots).map((one) => {
      const entry = element("span");
      const mark = element("i", "", one.dots ? "dot" : "");
      mark.style.background = one.color;
      entry.append(mark, several ? one.run.name : one.split);
      return entry;
    }));
    if (several) find(".legend", box).append(element("span", "lines: training, dots: evaluations"));
    if (!box.hidden) drawPlot(find("canvas", box), series, name === "accuracy", colors);
  }
}

function redraw() {
  if (state.chosen !== null) draw();
}

window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.addEventListener("visibilitychange", tick);
(async function follow() {
  await tick();
  setTimeout(follow, EVERY);
})();
