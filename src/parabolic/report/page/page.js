// The page's behaviour: charts, theme, sorting, where a number comes from. Text is inserted as text, never as HTML.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const root = document.documentElement;

// The reader's choices survive a reload, unless the page has no storage, as when it is opened as a file.
const choices = {
  get(store, name) { try { return window[store].getItem("parabolic." + name); } catch { return null; } },
  set(store, name, value) { try { window[store].setItem("parabolic." + name, value); } catch { /* forgotten */ } },
};

// --- theme
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  all(".chart.drawn").forEach(draw);
}
document.getElementById("theme").addEventListener("click", () => {
  const theme = dark() ? "light" : "dark";
  choices.set("localStorage", "theme", theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());

// --- charts
function draw(place) {
  const figure = data.figures[place.dataset.figure];
  const css = getComputedStyle(root), colour = name => css.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), fixedrange: narrow() };
  const { xaxis, yaxis, ...others } = figure.layout;
  const layout = {
    font: { family: "system-ui, sans-serif", size: narrow() ? 12 : 13, color: colour("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 12, t: 12, b: 44 },
    legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0, xanchor: "left", x: 0 },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--rule"), font: { color: colour("--ink") }, namelength: -1 },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...others,
  };
  const traces = structuredClone(figure.data);
  Plotly.react(place, traces, layout, {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtons: [["toImage", "resetScale2d"]],
    displayModeBar: !narrow() && matchMedia("(hover: hover)").matches && "hover",
  });
  if (!place.classList.contains("drawn")) {
    place.classList.add("drawn");
    place.on("plotly_click", event => {
      const { data: trace, pointNumber } = event.points[0];
      const keys = trace.meta && (Array.isArray(trace.meta[0]) ? trace.meta[pointNumber] : trace.meta);
      if (keys) showOrigin(keys);
    });
  }
}
const narrow = () => innerWidth < 640;
// A chart is drawn when it is scrolled near, so that a page of many scenes opens as fast as one of few.
const nearby = new IntersectionObserver(entries => entries.filter(each => each.isIntersecting).forEach(each => {
  nearby.unobserve(each.target);
  draw(each.target);
}), { rootMargin: "600px" });
all(".chart").forEach(place => nearby.observe(place));

// --- scenes: one at a time, where there are several
const chooser = document.getElementById("chooser");
function choose(id) {
  if (!chooser || !all(".scene").some(each => each.id === id)) return;
  chooser.value = id;
  all(".scene").forEach(each => { each.hidden = each.id !== id; });
  choices.set("sessionStorage", "scene", id);
}
if (chooser) {
  choose(location.hash.slice(1) || choices.get("sessionStorage", "scene") || chooser.value);
  if (all(".scene").every(each => !each.hidden)) choose(chooser.value);
  chooser.addEventListener("change", () => {
    choose(chooser.value);
    history.replaceState(null, "", "#" + chooser.value);  // takes precedence when the page is reloaded
  });
  addEventListener("hashchange", () => choose(location.hash.slice(1)));
}

// --- sorting
const valueOf = cell => {
  const text = cell.dataset.value ?? cell.textContent.trim();
  const number = cell.cellIndex ? Number.parseFloat(text) : NaN;  // first come names: a key may start with digits
  return text === "" || text === "–" ? null : /^[+-]?[\d.]/.test(text) && !Number.isNaN(number) ? number : text;
};
function compare(one, other) {
  if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other);
  return typeof one === "number" ? -1 : 1;
}
function sort(table, column, direction) {
  const heads = all("thead tr:last-child th", table);
  heads.forEach(head => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const rows = all("tbody tr", table).map(row => [valueOf(row.cells[column]), row]);
  rows.sort(([one], [other]) => one === null || other === null ? (one === null) - (other === null) : direction * compare(one, other));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}
all("table.sortable").forEach((table, place) => {
  all("thead tr:last-child th", table).forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const before = head.getAttribute("aria-sort");
    const first = head.classList.contains("number") ? -1 : 1;
    const direction = before ? (before === "ascending" ? -1 : 1) : first;
    sort(table, column, direction);
    choices.set("sessionStorage", "sort." + place, JSON.stringify([column, direction]));
  }));
  const before = data.refresh && choices.get("sessionStorage", "sort." + place);
  if (before) sort(table, ...JSON.parse(before));
});

// --- the list of all runs
const filter = document.getElementById("filter");
filter?.addEventListener("input", () => {
  const rows = all("#all tbody tr"), wanted = filter.value.toLowerCase();
  rows.forEach(row => { row.hidden = !row.textContent.toLowerCase().includes(wanted); });
  document.getElementById("count").textContent = wanted && `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
});

// --- where a number comes from
const dialog = document.getElementById("origin"), body = document.getElementById("origin-body");
function make(tag, ...inside) {
  const element = document.createElement(tag);
  element.append(...inside);
  return element;
}
function tableOf(heads, rows) {
  const row = (tag, cells) => make("tr", ...cells.map(cell => make(tag, cell)));
  const table = make("table", make("tbody", ...rows.map(cells => row("td", cells))));
  if (heads.length) table.prepend(make("thead", row("th", heads)));
  const wrapper = make("div", table);
  wrapper.className = "wide";
  return wrapper;
}
// A value that several runs share is listed once; where they differ, all are listed.
function mergedRows(records, bold = () => false) {
  const names = [...new Set(records.flatMap(Object.keys))].sort((a, b) => bold(b) - bold(a));
  return names.map(name => {
    const values = [...new Set(records.map(each => each[name] ?? "–"))];
    return [make(bold(name) ? "b" : "span", name), values.join("; ")];
  });
}
function showOrigin(keys) {
  const runs = keys.map(key => [key, data.runs[key]]).filter(([, run]) => run);
  if (!runs.length) return;
  const done = runs.filter(([, run]) => run.figures), unfinished = runs.filter(([, run]) => run.reason !== undefined);
  const environments = [...new Set(runs.map(([, run]) => run.around))].filter(place => place !== undefined).map(place => data.surroundings[place]);
  const unusual = new Set(runs.flatMap(([, run]) => run.unusual));
  const told = data.specs[runs[0][1].spec].heads === "True" ? ", the task told" : "";
  body.replaceChildren();
  if (done.length) body.append(tableOf(
    ["seed", `Acc${told}, %`, `AAA${told}, %`, `forgetting${told}, points`, "training, s", "testing, s", "finished, UTC", "folder"],
    done.map(([, run]) => [run.seed, ...run.figures, ...run.seconds, run.when.slice(0, 16).replace("T", " "), make("code", run.folder)].map(each => each instanceof Node ? each : String(each))),
  ));
  for (const [, run] of unfinished) body.append(make("h3", `Seed ${run.seed} ${run.how}`), make("p", run.reason), make("p", `${run.when}, `, make("code", run.folder)), ...(run.trace ? [make("pre", run.trace)] : []));
  const commands = [...new Set(environments.map(each => each.command))].filter(Boolean);
  if (commands.length) body.append(make("h3", "Command"), make("pre", commands.join("\n")));
  if (environments.length) body.append(make("h3", "Versions and hardware"), tableOf([], mergedRows(environments.map(({ command, ...others }) => others))));
  body.append(make("h3", "Settings"), make("p", "Settings that differ from the defaults are in bold."), tableOf([], mergedRows([...new Set(runs.map(([, run]) => run.spec))].map(place => data.specs[place]), name => unusual.has(name))));
  dialog.showModal();
  body.scrollTop = dialog.scrollTop = 0;
}
document.addEventListener("click", event => {
  const figure = event.target.closest("[data-runs]");
  if (figure) showOrigin(figure.dataset.runs.split(" "));
  if (event.target === dialog) dialog.close();
});

// --- a live page reloads itself, unless the reader is looking at details
setTheme(choices.get("localStorage", "theme"));
if (data.refresh) {
  const before = Number(choices.get("sessionStorage", "scroll"));
  if (before) scrollTo(0, before);
  setInterval(() => {
    if (dialog.open || document.hidden || filter?.value || document.activeElement === chooser) return;
    choices.set("sessionStorage", "scroll", String(scrollY));
    location.reload();
  }, 1000 * data.refresh);
}
