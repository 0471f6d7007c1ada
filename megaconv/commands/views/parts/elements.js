// Elements, numbers and axes that all parts of the report use. basics.js comes before this file.
const data = JSON.parse(document.getElementById("data").textContent);
const draw = (name, parent, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
// A drawing has the width that the window gives it, so that its text keeps its size on a phone.
const sheet = (svg, height) => {
  const width = Math.max(280, Math.round(svg.getBoundingClientRect().width));
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return width;
};
const key = (list, kind, text) => {
  const item = make("li", list), box = draw("svg", item, { class: "key", viewBox: "0 0 12 12", "aria-hidden": "true" });
  draw("rect", box, { class: kind, width: 12, height: 12 });
  item.append(text);
};
const choice = (select, value, text) => { make("option", select, text).value = value; };

const count = n => n.toLocaleString("en");
const bytes = n => { let unit = 0; while (n >= 1024 && unit < 4) { n /= 1024; unit++; } return (unit ? n.toFixed(2) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit]; };
const number = value => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};
const percent = share => share > 0 && share < 0.001 ? "<0.1%" : (100 * share).toFixed(1) + "%";
// The value of a tensor, or of several: the changed elements are shown as their share.
const valueOf = (stats, measure) => measure === "changed" ? stats.changed / Math.max(1, stats.elements) : stats[measure];
const shownOf = (value, measure) => value === null || value === undefined ? "not finite" : measure === "changed" ? percent(value) : number(value);
// About `wanted` round numbers from low to high.
const ticks = (low, high, wanted) => {
  const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999), found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
};
