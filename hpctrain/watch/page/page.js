// Requests the data of all runs every two seconds, and the curves that changed; draws with uPlot.
const token = new URLSearchParams(location.search).get("token");
const HUES = ["#1f77d0", "#d1651a", "#2a9d4a", "#b5379b", "#c9a100", "#0fa3a3", "#d33f49", "#7a5fd0"];
const GREY = "#77818e", FAINT = "#77818e40"; // for a light and a dark page
const find = (query) => document.querySelector(query);

let runs = [], shown = [], chosen = null, sort = -1, reversed = false;
const ticked = new Set(), curves = new Map(), boxes = new Map(), plots = new Map();

const element = (tag, textContent = "", className = "") =>
  Object.assign(document.createElement(tag), { textContent, className });

async function ask(path, query = {}, method = "GET") {
  return (await fetch(`${path}?${new URLSearchParams({ ...query, token })}`, { method })).json();
}

async function update() {
  let text = "no answer: has hpctrain watch ended?";
  try {
    const [columns, rows] = await ask("data", { sort });
    runs = reversed ? rows.reverse() : rows;
    const run = runs.find((each) => each.key === chosen) ?? runs[0];
    chosen = run?.key;
    shown = runs.filter((each) => each.key === chosen || ticked.has(each.key));
    showTable(columns);
    if (run) showChosen(run);
    for (const { key, version } of shown) {
      if (curves.get(key)?.[0] !== version) curves.set(key, await ask("curves", { run: key }));
    }
    draw();
    text = `updated ${new Date().toLocaleTimeString()}`;
  } catch { // the text says so
  }
  find("#connection").textContent = text;
}

function showTable(columns) {
  find("thead tr").replaceChildren(element("th"), ...columns.map((name, index) => {
    const head = element("th", reversed ? name.replace("↓", "↑") : name);
    head.onclick = () => {
      [reversed, sort] = [index === sort && !reversed, index];
      update();
    };
    return head;
  }));
  find("tbody").replaceChildren(...runs.map((run) => {
    const row = element("tr", "", run.key === chosen ? "chosen" : ""), box = element("input");
    Object.assign(box, { type: "checkbox", checked: ticked.has(run.key), title: "lay its curves over" });
    box.onclick = () => ticked[box.checked ? "add" : "delete"](run.key);
    row.append(element("td"), ...run.cells.map(([text]) => element("td", text)));
    row.cells[0].append(box);
    row.cells[2].className = run.status;
    row.onclick = (event) => {
      if (event.target !== box) chosen = run.key;
      update();
    };
    return row;
  }));
}

function showChosen(run) {
  document.title = `${run.name} ${run.status} - hpctrain watch`;
  find("h2").textContent = run.name;
  find("#status").textContent = run.text;
  find("#status").className = run.status;
  find("#stop").hidden = !run.can_be_stopped;
  const lines = [...run.facts, ...run.notes, run.key];
  find("#facts").replaceChildren(...lines.map((text) => element("div", text)));
  find("#stop").onclick = async () => {
    if (!confirm(`Stop ${run.name} after its next step? It is saved and tested.`)) return;
    alert(await ask("stop", { run: run.key }, "POST"));
  };
}

// Exponential means, without the weight of the zero they begin with.
function smooth(values, factor) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

// The series of uPlot, each with its data: lines of the training, dots of evaluations.
function seriesOf(name) {
  const hues = [...curves.keys()], factor = +find("#smoothing").value, alone = shown.length === 1;
  const splitsOf = (run) => Object.entries(curves.get(run.key)?.[1][name] ?? {});
  return shown.flatMap((run) => splitsOf(run).map(([split, points], index) => {
    const [steps, values] = [0, 1].map((part) => points.map((point) => point[part]));
    const isLine = split === "training", stroke = HUES[(alone ? index : hues.indexOf(run.key)) % HUES.length];
    return {
      label: alone ? split : `${run.name} ${split}`,
      stroke,
      spanGaps: isLine,
      width: isLine ? 1.5 : 0,
      points: { show: !isLine, size: 6, fill: stroke },
      value: (_, value) => (value == null ? "" : `${Number(value.toPrecision(5))}`),
      data: [steps, isLine ? smooth(values, factor) : values],
    };
  }));
}

// Makes a section for each figure; those that no run has any more stay, hidden.
function makeBoxes() {
  for (const name of shown.flatMap((run) => Object.keys(curves.get(run.key)?.[1] ?? {}))) {
    if (boxes.has(name)) continue;
    boxes.set(name, element("section"));
    find("#plots").append(boxes.get(name));
  }
}

function draw() {
  makeBoxes();
  for (const [name, box] of boxes) {
    const series = seriesOf(name), isLog = name === "loss" && find("#log").checked;
    box.hidden = !series.length;
    const width = box.clientWidth - 20, data = uPlot.join(series.map((one) => one.data));
    const key = JSON.stringify([series.map((one) => [one.label, one.stroke]), width, isLog]);
    const old = plots.get(name);
    if (old?.key === key) {
      const { min, max } = old.plot.scales.x, steps = old.plot.data[0];
      const isEnlarged = min > steps[0] || max < steps.at(-1);
      old.plot.setData(data, !isEnlarged);
      if (isEnlarged) old.plot.redraw();
    } else if (series.length) {
      old?.plot.destroy();
      const axis = { stroke: GREY, grid: { stroke: FAINT, width: 1 }, ticks: { show: false } };
      plots.set(name, { key, plot: new uPlot({
        title: name,
        width,
        height: Math.min(340, Math.max(220, width * 0.6)),
        scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
        axes: [{ ...axis, space: 80, size: 30 }, { ...axis, size: 60 }],
        padding: [null, 30, null, null],
        cursor: { sync: { key: "step" } },
        series: [{ label: "step" }, ...series],
      }, data, box) });
    }
  }
}

document.oninput = window.onresize = draw;
(async function follow() {
  if (!document.hidden) await update();
  setTimeout(follow, 2000);
})();
