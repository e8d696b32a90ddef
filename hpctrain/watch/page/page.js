// Requests the data of all runs every second, and the curves that changed; draws with uPlot.
const TOKEN = new URLSearchParams(location.search).get("token") ?? "";
const HUES = ["#1f77d0", "#d1651a", "#2a9d4a", "#b5379b", "#c9a100", "#0fa3a3", "#d33f49", "#7a5fd0"];
const SPLITS = { training: "--blue", validation: "--orange", test: "--green" };
const find = (query) => document.querySelector(query);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let columns = [], runs = [], chosen = null, sorted = null, falling = false;
const ticked = new Set(), curves = new Map(), plots = new Map();

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

async function ask(path, extra = {}, method = "GET") {
  const answer = await fetch(`${path}?${new URLSearchParams({ ...extra, token: TOKEN })}`, { method });
  return answer.json();
}

const shown = () => runs.filter((run) => run.key === chosen || ticked.has(run.key));

async function update() {
  let text = `updated ${new Date().toLocaleTimeString()}`, lost = false;
  try {
    ({ columns, runs } = await ask("data"));
    if (!runs.some((run) => run.key === chosen)) chosen = runs[0]?.key ?? null;
    showTable();
    showChosen();
    const old = shown().filter((run) => curves.get(run.key)?.version !== run.version);
    const answers = await Promise.all(old.map((run) => ask("curves", { run: run.key })));
    answers.forEach((answer) => curves.set(answer.key, answer));
    draw();
  } catch (error) {
    [text, lost] = ["no answer: has hpctrain watch ended?", true];
  }
  find("#connection").textContent = text;
  find("#connection").classList.toggle("lost", lost);
}

// Numbers from the largest, then texts, then what is unknown; in reverse if `falling`.
function compare(a, b) {
  const [x, y] = [a.cells[sorted]?.[1] ?? null, b.cells[sorted]?.[1] ?? null];
  if (x === null || y === null) return (x === null) - (y === null);
  const both = typeof x === "number" && typeof y === "number";
  return (both ? y - x : String(x).localeCompare(String(y))) * (falling ? -1 : 1);
}

function showTable() {
  find("#runs thead tr").replaceChildren(element("th"), ...columns.map((name, index) => {
    const head = element("th", name + (index === sorted ? (falling ? " ↑" : " ↓") : ""));
    head.onclick = () => {
      falling = sorted === index && !falling;
      sorted = index;
      showTable();
    };
    return head;
  }));
  const rows = sorted === null ? runs : [...runs].sort(compare);
  find("#runs tbody").replaceChildren(...rows.map((run) => {
    const row = element("tr", "", run.key === chosen ? "chosen" : "");
    const box = element("input");
    Object.assign(box, { type: "checkbox", checked: ticked.has(run.key), title: "lay its curves over" });
    box.onclick = (event) => {
      event.stopPropagation();
      ticked[box.checked ? "add" : "delete"](run.key);
      update();
    };
    row.append(element("td"), ...run.cells.map(([text]) => element("td", text)));
    row.cells[0].append(box);
    row.cells[2].className = run.status;
    row.onclick = () => {
      chosen = run.key;
      update();
    };
    return row;
  }));
}

function showChosen() {
  const run = runs.find((each) => each.key === chosen);
  find("#chosen").hidden = !run;
  if (!run) return;
  document.title = `${run.name} ${run.status} - hpctrain watch`;
  find("h2").textContent = run.name;
  find("#status").replaceChildren(element("span", run.text, run.status));
  find("#stop").hidden = !run.can_be_stopped;
  find("progress").value = run.share ?? 0;
  find("#progress").textContent = run.progress;
  find("dl").replaceChildren(...[...run.facts, ["folder", run.folder]].map(([name, text]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", text));
    return pair;
  }));
  find("#notes").replaceChildren(...run.notes.map((note) => element("div", note)));
}

find("#stop").onclick = async () => {
  const run = runs.find((each) => each.key === chosen);
  if (!confirm(`Stop ${run.name} after its next step? It is saved and tested.`)) return;
  const { text } = await ask("stop", { run: run.key }, "POST");
  await update();
  find("#connection").textContent = text;
};

// Exponential means, without the weight of the zero they begin with.
function smooth(values, factor) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

function seriesOf(name) {
  const factor = name === "accuracy" ? 100 : 1, laid = shown();
  return laid.flatMap((run) => Object.entries(curves.get(run.key)?.[name] ?? {}).map(([split, points]) => {
    const values = points.map((point) => factor * point[1]), isLine = split === "training";
    return {
      label: laid.length > 1 ? `${run.name} ${split}` : split,
      stroke: laid.length > 1 ? HUES[run.key % HUES.length] : color(SPLITS[split] ?? "--red"),
      isLine,
      data: [points.map((point) => point[0]), isLine ? smooth(values, +find("#smoothing").value) : values],
    };
  })).filter((one) => one.data[0].length);
}

function draw() {
  for (const name of ["loss", "accuracy"]) {
    const series = seriesOf(name), box = find(`#${name}`), isLog = name === "loss" && find("#log").checked;
    box.hidden = !series.length;
    const width = box.clientWidth - 20;
    const key = JSON.stringify([series.map((one) => [one.label, one.stroke]), width, isLog]);
    const data = uPlot.join(series.map((one) => one.data));
    if (plots.get(name)?.key === key) {
      const { plot } = plots.get(name), { min, max } = plot.scales.x, all = plot.data[0];
      const enlarged = min > all[0] || max < all[all.length - 1];
      plot.setData(data, !enlarged);
      if (enlarged) plot.redraw();
    } else if (series.length) {
      plots.get(name)?.plot.destroy();
      const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
      const plot = new uPlot({
        title: name === "accuracy" ? "accuracy (%)" : name,
        width,
        height: Math.min(340, Math.max(220, width * 0.6)),
        scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
        axes: [{ ...axis, space: 80, size: 30 }, { ...axis, size: 60 }],
        padding: [null, 30, null, null],
        cursor: { sync: { key: "step" } },
        series: [{ label: "step" }, ...series.map(({ label, stroke, isLine }) => ({
          label,
          stroke,
          spanGaps: isLine,
          width: isLine ? 1.5 : 0,
          points: { show: !isLine, size: 6, fill: stroke },
          value: (_, value) => (value == null ? "" : Number(value.toPrecision(5)).toString()),
        }))],
      }, data, box);
      plots.set(name, { key, plot });
    }
  }
}

for (const input of ["#smoothing", "#log"]) find(input).oninput = draw;
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
(async function follow() {
  if (!document.hidden) await update();
  setTimeout(follow, 1000);
})();
