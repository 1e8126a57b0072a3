"use strict";
// The page of a report: curves, and the table of prompts and answers. Texts enter by textContent only, never as markup.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"], DASHES = ["", "6 3", "2 3"];
const NS = "http://www.w3.org/2000/svg", PAGE = 25, NAMES = {log_ratio: "log-ratio to the reference, nats", kl: "KL to the reference over all tokens, nats", entropy: "entropy, nats"};
const chosen = {axis: "", hidden: new Set(), sort: "iteration", down: true, shown: PAGE};
let data = {};

const $ = (selector, root = document) => root.querySelector(selector);
function make(tag, content = {}, ...children) {
  const element = Object.assign(document.createElement(tag), content);
  element.append(...children);
  return element;
}
function draw(tag, attributes, text) {
  const element = document.createElementNS(NS, tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  if (text !== undefined) element.textContent = text;
  return element;
}
const look = i => ({colour: COLOURS[i % COLOURS.length], dash: DASHES[Math.floor(i / COLOURS.length) % DASHES.length]});
function number(x, step) {
  if (x === null || x === undefined) return "–";
  if (step && Math.abs(x) >= 1e4 && step < Math.abs(x) / 100) return x.toLocaleString("en");  // 12,100 and 12,150
  const size = Math.abs(x);
  if (size >= 1e6) return +(x / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(x / 1e3).toPrecision(3) + "k";
  return size !== 0 && size < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(4));
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(x => x * power >= rough) * power, found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
function tip(event, text) {
  const box = $("#tip");
  box.hidden = !text;
  box.textContent = text;
  if (!text) return;
  const right = innerWidth - box.offsetWidth - 8, below = innerHeight - box.offsetHeight - 8;
  box.style.left = Math.max(4, Math.min(event.clientX + 14, right)) + "px";
  box.style.top = Math.max(4, Math.min(event.clientY + 14, below)) + "px";
}

function chart(panel) {
  const W = 420, H = 230, left = 48, right = 10, top = 8, bottom = 34;
  const fraction = panel.over === "steps" && chosen.axis === "fraction";
  const lines = panel.lines.filter(line => line.case === null || !chosen.hidden.has(data.cases[line.case]));
  const at = line => fraction ? line.x.map(x => x / line.x[line.x.length - 1]) : line.x;
  const xs = lines.flatMap(at).filter(x => x !== null);
  const ys = lines.flatMap(line => [line.mean, line.low, line.high, ...line.seeds].flatMap(each => each || [])).filter(y => y !== null);
  const root = make("div", {}, make("h3", {textContent: panel.title}));
  if (!ys.length) return root;
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (panel.over === "steps") x0 = 0;
  if (x0 === x1) [x0, x1] = [x0 - .5, x1 + .5];
  const room = (y1 - y0) * .04 || Math.abs(y0) * .1 || .5;
  [y0, y1] = [y0 - room, y1 + room];
  const X = x => left + (x - x0) / (x1 - x0) * (W - left - right), Y = y => H - bottom - (y - y0) / (y1 - y0) * (H - top - bottom);
  const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": panel.title});
  const levels = ticks(y0, y1, 5);
  for (const y of levels) {
    svg.append(draw("line", {x1: left, x2: W - right, y1: Y(y), y2: Y(y), class: "grid"}));
    svg.append(draw("text", {x: left - 5, y: Y(y) + 4, "text-anchor": "end"}, number(y, levels[1] - levels[0])));
  }
  for (const x of ticks(x0, x1, 5)) {
    svg.append(draw("line", {x1: X(x), x2: X(x), y1: H - bottom, y2: H - bottom + 4, class: "grid"}));
    svg.append(draw("text", {x: X(x), y: H - bottom + 16, "text-anchor": "middle"}, number(x)));
  }
  const label = fraction ? "fraction of training" : panel.over;
  svg.append(draw("text", {x: (left + W - right) / 2, y: H - 3, "text-anchor": "middle"}, label));
  const path = (x, y) => x.map((each, i) => [each, y[i]]).reduce(([d, pen], [a, b]) =>
    a === null || b === null ? [d, "M"] : [d + pen + X(a).toFixed(1) + " " + Y(b).toFixed(1), "L"], ["", "M"])[0];
  for (const line of lines) {
    const {colour, dash} = look(line.look), x = at(line), style = {fill: "none", stroke: colour, "stroke-dasharray": dash};
    if (line.low) {
      const known = x.map((_, i) => i).filter(i => line.low[i] !== null);
      const edge = known.map(i => `${X(x[i])},${Y(line.high[i])}`).concat(known.reverse().map(i => `${X(x[i])},${Y(line.low[i])}`));
      svg.append(draw("polygon", {points: edge.join(" "), fill: colour, opacity: .18}));
    }
    for (const seed of line.seeds) svg.append(draw("path", {...style, d: path(x, seed), "stroke-width": .7, opacity: .5}));
    svg.append(draw("path", {...style, d: path(x, line.mean), "stroke-width": 1.8}));
    if (panel.over !== "steps") for (const i of [0, x.length - 1]) if (x[i] !== null && line.mean[i] !== null)
      svg.append(draw("circle", {cx: X(x[i]), cy: Y(line.mean[i]), r: i ? 4 : 2.5, fill: colour}));
  }
  const cursor = draw("line", {y1: top, y2: H - bottom, class: "grid", visibility: "hidden"});
  svg.append(cursor);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - left) / (W - left - right) * (x1 - x0);
    const said = lines.map(line => {
      const places = at(line), known = places.map((_, i) => i).filter(i => places[i] !== null && line.mean[i] !== null);
      if (!known.length) return "";
      const i = known.reduce((a, b) => Math.abs(places[b] - x) < Math.abs(places[a] - x) ? b : a);
      const spread = line.low && line.low[i] !== null ? ` (${number(line.low[i])} to ${number(line.high[i])})` : "";
      return `${line.name}: ${number(line.mean[i])}${spread}` + (line.steps ? ` at ${number(line.steps[i])} steps` : "");
    });
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, X(Math.max(x0, Math.min(x1, x))));
    cursor.setAttribute("visibility", "visible");
    tip(event, [`${label} ${number(x)}`, ...said].filter(Boolean).join("\n"));
  });
  svg.addEventListener("pointerleave", event => { cursor.setAttribute("visibility", "hidden"); tip(event, ""); });
  root.append(svg);
  if (panel.keyed) for (const line of lines) root.append(key("span", line.name, line.look, "key"));
  return root;
}
function key(tag, name, place, className = "") {
  const {colour, dash} = look(place), swatch = make("span", {className: "swatch"});
  swatch.style.borderTopColor = colour;
  swatch.style.borderTopStyle = dash ? "dashed" : "solid";
  return make(tag, {className}, swatch, name);
}
function charts() {
  const place = $("#charts");
  if (!place) return;
  const axis = $("select[name=axis]");
  chosen.axis = chosen.axis || data.axis;
  axis.value = chosen.axis;
  axis.onchange = () => { chosen.axis = axis.value; charts(); };
  $("#legend").replaceChildren(...data.cases.map((name, i) => {
    const button = key("button", name, i);
    button.type = "button";
    button.setAttribute("aria-pressed", !chosen.hidden.has(name));
    button.onclick = () => { chosen.hidden[chosen.hidden.has(name) ? "delete" : "add"](name); charts(); };
    return button;
  }));
  place.replaceChildren(...data.panels.map(chart));
}

const COLUMNS = {episode: "episode", case: "case", seed: "seed", iteration: "iteration", steps: "steps", score: "score", kl: "KL", length: "tokens", prompt: "prompt", completion: "answer"};
function value(row, name) { return name === "length" ? (row.tokens ? row.tokens.chosen.filter(Boolean).length : null) : name === "case" ? data.cases[row.case] : row[name]; }
function selected() {
  const form = $("#find"), search = form.search.value.toLowerCase();
  const rows = data.samples.filter(row => ["case", "seed", "iteration"].every(name => form[name].value === "" || String(value(row, name)) === form[name].value)
    && (!search || `${row.prompt}\n${row.completion}`.toLowerCase().includes(search)));
  if (chosen.sort) rows.sort((a, b) => {
    const [x, y] = [value(a, chosen.sort), value(b, chosen.sort)], empty = z => z === null || z === undefined;
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    return (chosen.down ? -1 : 1) * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
  });
  return rows;
}
function answer(row, shade, most) {
  const cell = make("td", {className: "text"}), tokens = row.tokens;
  if (!tokens || !shade || !tokens[shade]) {
    cell.textContent = row.completion;
    return cell;
  }
  tokens.text.forEach((text, i) => {
    const span = make("span", {textContent: (text || "·").replaceAll("\n", "⏎\n")});
    if (tokens.chosen[i]) {
      const x = tokens[shade][i];
      span.style.background = `rgb(var(--${x < 0 ? "bad" : "good"}) / ${(.75 * Math.min(1, Math.abs(x) / most)).toFixed(3)})`;
      span.onpointermove = event => tip(event, data.shades.filter(name => tokens[name]).map(name => `${NAMES[name] || name} ${number(tokens[name][i])}`).join("\n"));
      span.onpointerleave = event => tip(event, "");
    } else span.className = "reply";
    cell.append(span);
  });
  return cell;
}
function table() {
  const place = $("#samples");
  if (!place) return;
  const form = $("#find"), rows = selected(), shade = form.shade.value;
  const columns = Object.keys(COLUMNS).filter(name => data.samples.some(row => { const x = value(row, name); return x !== undefined && x !== null; }));
  const values = rows.flatMap(row => shade && row.tokens && row.tokens[shade] ? row.tokens[shade].filter((_, i) => row.tokens.chosen[i]).map(Math.abs) : []).sort((a, b) => a - b);
  const most = values[Math.floor(values.length * .98)] || values[values.length - 1] || 1;
  $("#count").textContent = `${rows.length} of ${data.samples.length} answers.`;
  $("#printed").textContent = rows.length > chosen.shown ? `The first ${chosen.shown} are printed.` : "";
  $("#scale").textContent = shade ? `Green is positive, red negative; the strongest colour is ±${number(most)} and beyond.` : "";
  $("thead", place).replaceChildren(make("tr", {}, ...columns.map(name => {
    const button = make("button", {type: "button", textContent: COLUMNS[name] + (chosen.sort === name ? (chosen.down ? " ↓" : " ↑") : "")});
    button.onclick = () => { chosen.down = chosen.sort === name && !chosen.down; chosen.sort = name; table(); };
    const head = make("th", {}, button);
    head.setAttribute("aria-sort", chosen.sort !== name ? "none" : chosen.down ? "descending" : "ascending");
    return head;
  })));
  $("tbody", place).replaceChildren(...rows.slice(0, chosen.shown).map(row => make("tr", {}, ...columns.map(name => {
    if (name === "completion") return answer(row, shade, most);
    const x = value(row, name), cell = make("td", {className: name === "prompt" ? "text" : typeof x === "number" ? "number" : ""});
    cell.dataset.label = COLUMNS[name];
    cell.textContent = typeof x === "number" ? (["episode", "seed", "iteration", "length"].includes(name) ? x : number(x)) : x === undefined || x === null ? "–" : x;
    if (name === "score" && row.parts) for (const part in row.parts) cell.append(make("br"), make("small", {textContent: `${part} ${number(row.parts[part])}`}));
    return cell;
  }))));
  const more = $("#more");
  more.hidden = rows.length <= chosen.shown;
  more.onclick = () => { chosen.shown += PAGE; table(); };
}
function choices() {
  const form = $("#find");
  if (!form) return;
  for (const name of ["case", "seed", "iteration"]) {
    const found = [...new Set(data.samples.map(row => value(row, name)))].filter(x => x !== undefined && x !== null);
    if (name !== "case") found.sort((a, b) => a - b);
    form[name].append(...found.map(x => make("option", {value: x, textContent: x})));
    form[name].parentElement.hidden = found.length < 2;
  }
  form.shade.append(make("option", {value: "", textContent: "nothing"}), ...data.shades.map(name => make("option", {value: name, textContent: NAMES[name] || name})));
  form.shade.parentElement.hidden = !data.shades.length;
  form.shade.value = data.shades[0] || "";
  form.onsubmit = event => event.preventDefault();
  form.oninput = () => { chosen.shown = PAGE; table(); };
}
function begin() {
  const element = $("#data");
  if (!element) return;
  data = JSON.parse(element.textContent);
  charts();
  choices();
  table();
  for (const link of document.querySelectorAll('a[href^="#"]')) link.onclick = event => {  // also in a notebook's frame
    event.preventDefault();
    $(link.getAttribute("href")).scrollIntoView();
  };
}
async function refresh() {
  // While a training runs, 'algos watch' serves the page again; what the reader has chosen stays.
  try {
    const answer = await fetch(location.href, {cache: "no-store"});
    if (!answer.ok) throw Error((await answer.json()).error);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!$("#data", next)) $("main").replaceWith($("main", next));  // there is no run now: the page says so
    else if (!$("#data") || $("#data", next).textContent !== $("#data").textContent) {
      const kept = $("#find") ? Object.fromEntries(new FormData($("#find"))) : {}, focus = document.activeElement.name, [x, y] = [scrollX, scrollY];
      $("main").replaceWith($("main", next));
      begin();
      const form = $("#find");
      for (const name in form ? kept : {}) if (!form[name].options || [...form[name].options].some(option => option.value === kept[name])) form[name].value = kept[name];
      if (focus && $(`[name=${focus}]`)) $(`[name=${focus}]`).focus();
      table();
      scrollTo(x, y);
    }
    document.title = document.title.replace(/^\(not connected\) /, "");
    $("#trouble").hidden = true;
  } catch (error) {
    if (!document.title.startsWith("(")) document.title = "(not connected) " + document.title;
    $("#trouble").textContent = `Not renewed: ${error.message}`;
    $("#trouble").hidden = false;
  }
  setTimeout(refresh, data.live * 1000);
}
begin();
if (data.live) setTimeout(refresh, data.live * 1000);
