// The page: what it shows, and when it draws again.
at("title").textContent = document.title = data.path;
for (const [label, text] of data.facts) { make("dt", at("facts"), label); make("dd", at("facts"), text); }
const drawChosen = () => { drawPlot(); drawHistograms(); };
const drawAll = () => {
  drawMap();
  if (data.layout) drawRanks();
  if (data.maps.length) drawHeat();
  if (groups.size || alone.length) drawChosen();
};
if (groups.size || alone.length) {
  at("plot-part").hidden = false;
  at("plot-title").textContent = data.about;
  for (const [measure, text] of Object.entries(data.measures)) choice(at("measure"), measure, text);
  for (const kind of groups.keys()) choice(at("kind"), kind, kind);
  for (const row of withHistograms ? alone : []) choice(at("kind"), row.name, row.name);
  // Large tensors say more than norms, which often come first.
  const size = kind => groups.get(kind)[0][1].elements;
  if (withHistograms && groups.size) at("kind").value = [...groups.keys()].reduce((a, b) => size(b) > size(a) ? b : a);
  at("kind").onchange = at("measure").onchange = drawChosen;
  at("logarithmic").onchange = drawHistograms;
}
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
drawAll();
fill();
