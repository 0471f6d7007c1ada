// A number of each kind of tensor by layer, with one kind for each expert or other number behind the layer's.
const numbered = /^(.*?\.)(\d+)(\..*)$/, groups = new Map(), alone = [];
const grouped = (kind, layer, stats) => { if (!groups.has(kind)) groups.set(kind, []); groups.get(kind).push([layer, stats]); };
for (const row of data.layers) {
  const match = /^(.*\.)(\d+)$/.exec(row.name);
  if (match) grouped(match[1] + "*", Number(match[2]), row.stats);
}
for (const row of data.tensors) {
  const match = row.stats && numbered.exec(row.name);
  if (match) grouped(match[1] + "*" + match[3], Number(match[2]), row.stats);
  else if (row.stats) alone.push(row);
}
for (const points of groups.values()) points.sort((a, b) => a[0] - b[0]);
const drawPlot = () => {
  const svg = at("plot"), height = 260, width = sheet(svg, height), measure = at("measure").value;
  const name = data.measures[measure], kind = at("kind").value;
  const points = (groups.get(kind) ?? []).map(([layer, stats]) => [layer, valueOf(stats, measure)]).filter(point => Number.isFinite(point[1]));
  svg.style.display = points.length ? "" : "none";
  if (!points.length) return;
  const values = points.map(point => point[1]), low = Math.min(0, ...values), high = Math.max(0, ...values), last = Math.max(1, points.at(-1)[0]);
  const left = 70, right = width - 14, bottom = height - 42, top = 24;
  const x = layer => left + (right - left) * layer / last, y = value => bottom - (bottom - top) * (value - low) / ((high - low) || 1);
  for (const value of ticks(low, high, 5)) {
    draw("line", svg, { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" });
    draw("text", svg, { x: left - 8, y: y(value) + 4, "text-anchor": "end", class: "soft" }, shownOf(value, measure));
  }
  for (const layer of ticks(0, last, Math.max(2, Math.floor(width / 90)))) {
    if (Number.isInteger(layer)) draw("text", svg, { x: x(layer), y: bottom + 18, "text-anchor": "middle", class: "soft" }, layer);
  }
  draw("text", svg, { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, "layer");
  draw("text", svg, { x: 0, y: 12 }, name);
  draw("polyline", svg, { points: points.map(point => x(point[0]) + "," + y(point[1])).join(" "), class: "line l0" });
  for (const [layer, value] of points) draw("title", draw("circle", svg, { cx: x(layer), cy: y(value), r: 3.5, class: "p0" }), {}, `layer ${layer}: ${shownOf(value, measure)}`);
  svg.setAttribute("aria-label", `${name} of ${kind} by layer, from ${shownOf(Math.min(...values), measure)} to ${shownOf(Math.max(...values), measure)}`);
};
