// The page: requests the summaries every second and the curves that changed, and redraws on change.

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
  document.title = run ? `${run.name} ${run.cells[3]} - hpctrain watch` : "hpctrain watch";
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
    const [, status, ...numbers] = run.cells;
    const cells = [cell(box), cell(swatch, name), cell(element("span", status, run.status))];
    cells[2].title = run.text;
    cells[2].className = "status";
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
  find("#progress").textContent = run.progress;
  find("#facts").replaceChildren(...run.facts.map(([name, text]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", text));
    return pair;
  }));
  find("#notes").replaceChildren(...run.notes.map((note) => element("li", note)));
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
