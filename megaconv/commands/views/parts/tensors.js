// The table of tensors, with search and sorting.
const MOST_ROWS = 2000;
const columns = [["name", row => row.name], ["shape", row => row.shape.join(" × ")], ["dtype", row => row.dtype], ["parameters", row => row.parameters], ["bytes", row => row.bytes]];
const withStats = data.tensors.some(row => row.stats);
if (withStats) for (const name of data.columns) columns.push([name, row => row.stats ? row.stats[name] : null]);
const withHistograms = data.tensors.some(row => row.stats && row.stats.histogram);
const shown = value => typeof value !== "number" ? value ?? "" : Number.isInteger(value) ? count(value) : number(value);
const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
let sorted = null, down = false;
const line = row => {
  const made = document.createElement("tr");
  for (const [, of] of columns) { const value = of(row); make("td", made, shown(value), typeof value === "number" ? "n" : ""); }
  if (!withHistograms) return made;
  const cell = make("td", made);
  if (!row.stats || !row.stats.sampled) return made;
  const svg = draw("svg", cell, { viewBox: "0 0 74 18", class: "tiny", role: "img", "aria-label": `histogram, ${about(row.stats)}` });
  histogram(svg, row.stats, row.stats.min, row.stats.max, 74, 18, false);
  return made;
};
const fill = () => {
  const wanted = at("search").value.toLowerCase();
  let rows = data.tensors.filter(row => row.name.toLowerCase().includes(wanted));
  if (sorted !== null) rows = [...rows].sort((a, b) => order(columns[sorted][1](a), columns[sorted][1](b)) * (down ? -1 : 1));
  at("count").textContent = `${count(rows.length)} of ${count(data.tensors.length)}` + (rows.length > MOST_ROWS ? `, the first ${count(MOST_ROWS)} are listed` : "");
  at("rows").replaceChildren(...rows.slice(0, MOST_ROWS).map(line));
};
columns.forEach(([name, of], index) => {
  const head = make("th", at("head"), undefined, data.tensors.some(row => typeof of(row) === "number") ? "n" : ""), button = make("button", head, name);
  button.type = "button";
  button.onclick = () => {
    down = sorted === index && !down; sorted = index;
    for (const other of at("head").children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    fill();
  };
});
if (withHistograms) make("th", at("head"), "histogram");
at("search").oninput = fill;
