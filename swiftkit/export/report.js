"use strict";
// The read-out of the curves, by mouse, touch or arrow keys, and the scale's button.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
tip.role = "status";
document.body.append(tip);
const names = [...document.querySelectorAll("#runs li")].map((item) => item.textContent);

function linesOf(svg) {
  return [...svg.querySelectorAll(".linear polyline[data-run]")].map((line) => ({
    run: Number(line.dataset.run),
    look: line.getAttribute("class").replace("faint", ""),
    steps: line.dataset.steps.split(" ").map(Number),
    values: line.dataset.values.split(" "),
  }));
}

/** The place in rising numbers that is nearest to one. */
function nearest(numbers, wanted) {
  let low = 0;
  let high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] > wanted) high = middle;
    else low = middle;
  }
  return Math.abs(numbers[low] - wanted) <= Math.abs(numbers[high] - wanted) ? low : high;
}

function readOut(svg, wanted) {
  const lines = linesOf(svg).map((line) => ({ ...line, at: nearest(line.steps, wanted) }));
  const off = (line) => Math.abs(line.steps[line.at] - wanted);
  const closest = lines.reduce((best, line) => (off(line) < off(best) ? line : best));
  const step = closest.steps[closest.at];
  const rows = lines.filter((line) => line.steps[line.at] === step || lines.length > 1);
  const head = document.createElement("div");
  head.textContent = `step ${step}`;
  tip.replaceChildren(head, ...rows.map((line) => row(line, step)));
  return step;
}

function row(line, step) {
  const entry = document.createElement("div");
  entry.className = "row";
  const swatch = document.createElement("span");
  swatch.className = `swatch ${line.look}`;
  const own = line.steps[line.at];
  const name = names.length > 1 ? `  ${names[line.run]}` : "";
  entry.append(swatch, `${line.values[line.at]}${own === step ? "" : ` (step ${own})`}${name}`);
  return entry;
}

function show(svg, wanted, clientX, clientY) {
  const { low, high, left, right } = Object.fromEntries(
    Object.entries(svg.dataset).map(([name, value]) => [name, Number(value)]),
  );
  const step = readOut(svg, wanted);
  const x = left + ((step - low) / (high - low)) * (right - left);
  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  cursor.setAttribute("visibility", "visible");
  svg.dataset.step = step;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(clientY + 14, innerHeight - height - 8))}px`;
}

function hide(svg) {
  svg.querySelector(".cursor").setAttribute("visibility", "hidden");
  tip.hidden = true;
}

function pointed(event) {
  const svg = event.currentTarget;
  const box = svg.getBoundingClientRect();
  const { low, high, left, right } = svg.dataset;
  const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  const share = (x - Number(left)) / (Number(right) - Number(left));
  show(svg, Number(low) + share * (Number(high) - Number(low)), event.clientX, event.clientY);
}

function keyed(event) {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!way) return;
  event.preventDefault();
  const svg = event.currentTarget;
  const steps = [...new Set(linesOf(svg).flatMap((line) => line.steps))].sort((a, b) => a - b);
  const now = svg.dataset.step === undefined ? (way > 0 ? -1 : steps.length) : steps.indexOf(Number(svg.dataset.step));
  const step = steps[Math.max(0, Math.min(steps.length - 1, now + way))];
  const box = svg.getBoundingClientRect();
  const { low, high, left, right } = svg.dataset;
  const x = Number(left) + ((step - low) / (high - low)) * (right - left);
  show(svg, step, box.left + (x / svg.viewBox.baseVal.width) * box.width, box.top + box.height / 3);
}

for (const svg of document.querySelectorAll(".chart svg")) {
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", () => hide(svg));
  svg.addEventListener("blur", () => hide(svg));
  svg.addEventListener("keydown", keyed);
}

for (const button of document.querySelectorAll("button[data-look]")) {
  button.addEventListener("click", () => {
    const on = document.body.classList.toggle(button.dataset.look);
    button.setAttribute("aria-pressed", String(on));
  });
}
for (const buttons of document.querySelectorAll(".buttons")) buttons.hidden = false;
