// Histograms of one kind of tensor: one for each layer, all on the axis of the smallest to the largest value among them.
const MOST_HISTOGRAMS = 128;
const histogram = (svg, stats, low, high, width, height, logarithmic) => {
  const size = n => logarithmic ? Math.log1p(n) : n, most = size(Math.max(...stats.histogram)) || 1, span = (high - low) || 1;
  const bin = (stats.max - stats.min) / stats.histogram.length, room = bin ? width * bin / span : width / stats.histogram.length;
  let path = "";
  stats.histogram.forEach((n, index) => {
    const x = width * (stats.min + (bin ? bin * index : 0) - low) / span, tall = n ? Math.max(0.7, height * size(n) / most) : 0;
    if (n) path += `M${x.toFixed(2)} ${height}v${(-tall).toFixed(2)}h${Math.max(0.8, room).toFixed(2)}v${tall.toFixed(2)}z`;
  });
  draw("path", svg, { d: path, class: "p0" });
};
const about = stats => `from ${number(stats.min)} to ${number(stats.max)}, mean ${number(stats.mean)}, deviation ${number(stats.std)}`;
const drawHistograms = () => {
  const kind = at("kind").value, one = alone.find(row => row.name === kind), all = one ? [["", one.stats]] : groups.get(kind);
  const found = all.filter(([, stats]) => stats.histogram && stats.sampled).slice(0, MOST_HISTOGRAMS);
  at("histogram-part").hidden = !found.length;
  at("histograms").replaceChildren();
  if (!found.length) return;
  const low = Math.min(...found.map(([, stats]) => stats.min)), high = Math.max(...found.map(([, stats]) => stats.max));
  at("histogram-text").textContent = `${kind}: the values, from ${number(low)} at the left to ${number(high)} at the right of each drawing. The fullest bin has the full height.` +
    (all.length > found.length ? ` ${found.length} of ${all.length} are drawn.` : "");
  for (const [layer, stats] of found) {
    const figure = make("figure", at("histograms")), name = layer === "" ? kind : `layer ${layer}`;
    const svg = draw("svg", figure, { viewBox: "0 0 160 62", role: "img", "aria-label": `histogram of ${name}, ${about(stats)}` });
    draw("title", svg, {}, `${name}: ${about(stats)}`);
    histogram(svg, stats, low, high, 160, 60, at("logarithmic").checked);
    draw("line", svg, { x1: 0, x2: 160, y1: 60.5, y2: 60.5, class: "axis" });
    make("figcaption", figure, `${name} · σ ${number(stats.std)}`);
  }
};
