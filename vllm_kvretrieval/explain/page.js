"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const make = (kind, parent, text) => {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};
const percent = (share) => (100 * share).toFixed(1);
const sizes = data.begins.map((begin, n) => (data.begins[n + 1] ?? data.tokens) - begin);
let row = data.first;
let step = data.steps.length - 1;
let chosen = -1;

find("facts").textContent = data.facts;
find("verb").textContent = data.verb;

const spans = data.texts.map((text, n) => {
  const span = make("span", find("text"), text);
  span.addEventListener("click", () => choose(n, false));
  return span;
});
const bars = data.texts.map((_, n) => {
  const bar = make("button", find("map"));
  make("i", bar);
  bar.addEventListener("click", () => choose(n, true));
  return bar;
});

const cells = [];
if (data.shares.length) {
  find("of-heads").hidden = false;
  data.shares.forEach((layer) => {
    const line = make("tr", find("heads"));
    make("th", line, `layer ${layer.layer}`).scope = "row";
    layer.heads.forEach((share) => {
      const cell = make("button", make("td", line), percent(share));
      const number = cells.length;
      cell.style.background = `hsl(var(--hue) / ${(1 - share) * 0.8})`;
      cell.title = data.rows[number].name;
      cell.addEventListener("click", () => { row = number; draw(); });
      cells.push(cell);
    });
  });
} else {
  const line = make("p", find("which").parentNode);
  find("which").after(line);
  data.rows.forEach((one, number) => {
    const cell = make("button", line, one.name);
    line.append(" ");
    cell.addEventListener("click", () => { row = number; draw(); });
    cells.push(cell);
  });
}

find("steps").hidden = data.steps.length < 2;
find("step").max = data.steps.length - 1;
find("step").value = step;
find("step").addEventListener("input", (event) => { step = Number(event.target.value); draw(); });

function choose(number, scroll) {
  chosen = number;
  if (scroll) spans[number].scrollIntoView({ block: "center" });
  draw();
}

function about(number, one) {
  const begin = data.begins[number];
  const kept = one.kept ? `, ${one.kept[number]} of ${sizes[number]} tokens ${data.verb}` : "";
  return `tokens ${begin} to ${begin + sizes[number] - 1}: ${percent(one.weights[number])} %${kept}`;
}

function draw() {
  const one = data.rows[row].steps[step];
  const highest = Math.max(...one.weights, 1e-9);
  const part = one.share === null ? "" : `; ${percent(one.share)} % of its attention on what is ${data.verb}`;
  find("which").textContent = `${data.rows[row].name}${part}`;
  find("at").textContent = data.steps[step];
  cells.forEach((cell, n) => cell.setAttribute("aria-pressed", String(n === row)));
  one.weights.forEach((weight, n) => {
    const kept = Boolean(one.kept && one.kept[n] * 2 >= sizes[n]);
    const level = Math.sqrt(weight / highest);
    spans[n].style.background = `hsl(var(--hue) / ${(level * 0.6).toFixed(3)})`;
    spans[n].title = bars[n].title = about(n, one);
    bars[n].firstChild.style.height = `${(100 * level).toFixed(1)}%`;
    spans[n].classList.toggle("kept", kept);
    bars[n].classList.toggle("kept", kept);
    spans[n].classList.toggle("chosen", n === chosen);
  });
  const order = one.weights.map((_, n) => n).sort((a, b) => one.weights[b] - one.weights[a]);
  find("most").replaceChildren();
  order.slice(0, 5).forEach((n) => {
    const button = make("button", make("li", find("most")), about(n, one));
    button.addEventListener("click", () => choose(n, true));
  });
}
draw();
