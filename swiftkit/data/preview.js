"use strict";
// The read-out of a token, and the two buttons. Without JavaScript the page shows the same, but for these.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
tip.role = "status";
document.body.append(tip);

const KINDS = { t: "trained", s: "special", x: "not in a window" };

function readOut(token) {
  const place = Array.prototype.indexOf.call(token.parentNode.children, token);
  const kinds = [...token.classList].map((name) => KINDS[name]).filter(Boolean);
  const words = kinds.includes("trained") || kinds.includes("not in a window") ? kinds : ["context", ...kinds];
  return `id ${token.dataset.i}  ·  token ${place}\n${words.join(", ")}`;
}

function show(event) {
  const token = event.target.closest?.(".tokens span");
  tip.hidden = !token;
  if (!token) return;
  tip.textContent = readOut(token);
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, innerWidth - width - 8);
  const below = event.clientY + 20;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
}
document.addEventListener("mousemove", show);

// From a row's text the arrow keys go from token to token.
document.addEventListener("keydown", (event) => {
  const row = event.target.closest?.(".tokens");
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!row || !way) return;
  event.preventDefault();
  const tokens = [...row.querySelectorAll("span")];
  const now = tokens.findIndex((token) => token.classList.contains("now"));
  tokens[now]?.classList.remove("now");
  const token = tokens[Math.max(0, Math.min(tokens.length - 1, now + way))];
  token.classList.add("now");
  token.scrollIntoView({ block: "nearest" });
  const { left, top } = token.getBoundingClientRect();
  show({ target: token, clientX: left, clientY: top });
});
document.addEventListener("focusout", () => {
  document.querySelector(".now")?.classList.remove("now");
  tip.hidden = true;
});
document.addEventListener("touchstart", (event) => show({ target: event.target, ...point(event) }), { passive: true });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

function point(event) {
  const { clientX, clientY } = event.touches[0];
  return { clientX, clientY };
}

for (const button of document.querySelectorAll("button[data-look]")) {
  button.addEventListener("click", () => {
    const on = document.body.classList.toggle(button.dataset.look);
    button.setAttribute("aria-pressed", String(on));
  });
}
for (const buttons of document.querySelectorAll(".buttons")) buttons.hidden = false;
