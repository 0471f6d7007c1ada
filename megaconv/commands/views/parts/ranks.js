// The layout: a row for each pipeline rank, a column for each layer, and what one rank of the row holds.
const LAYERS = { dense: ["p0", "a layer"], experts: ["p3", "a layer with experts"], linear: ["p2", "a layer of linear attention"] };
const drawRanks = () => {
  const { stages, of_a_rank: ranks, kinds } = data.layout, layers = kinds.length, svg = at("layout");
  const narrow = svg.getBoundingClientRect().width < 640, row = narrow ? 44 : 28, top = 20;
  const width = sheet(svg, top + ranks.length * row), left = 64, right = width - (narrow ? 18 : 250), step = (right - left) / Math.max(1, layers);
  const rect = (x, y, w, kind, tip) => draw("title", draw("rect", svg, { x, y, width: w, height: 20, class: kind }), {}, tip);
  for (const layer of ticks(0, layers - 1, Math.max(1, Math.min(12, Math.floor((right - left) / 40))))) {
    if (Number.isInteger(layer)) draw("text", svg, { x: left + (layer + 0.5) * step, y: 12, class: "soft", "text-anchor": "middle" }, layer);
  }
  draw("text", svg, { x: 0, y: 12, class: "soft" }, "layer");
  for (const rank of ranks) {
    const y = top + rank.pp_rank * row, size = `${count(rank.parameters)} parameters, ${bytes(rank.bytes)}`;
    draw("text", svg, { x: 0, y: y + 15 }, `pp ${rank.pp_rank}`);
    draw("text", svg, narrow ? { x: left - 12, y: y + 34, class: "soft" } : { x: width, y: y + 15, "text-anchor": "end" }, size);
  }
  for (const stage of stages) {
    const y = top + stage.pp_rank * row, rank = ranks[stage.pp_rank], stop = stage.first_layer + stage.layers;
    for (let layer = stage.first_layer; layer < stop; layer++) {
      const tip = `layer ${layer}: pp ${stage.pp_rank}, ${count(rank.parameters)} parameters a rank, ${bytes(rank.bytes)}`;
      rect(left + layer * step, y, Math.max(0.8, step - (step > 4 ? 1.5 : 0.3)), LAYERS[kinds[layer]][0], tip);
    }
    if (stage.embedding) rect(left + stage.first_layer * step - 12, y, 10, "p1", "embedding");
    if (stage.head) rect(left + stop * step + 2, y, 10, "p4", "head");
  }
  const many = data.layout.ranks > 1, per = data.layout.experts_of_ep_rank;
  const text = `TP ${data.layout.tp}, PP ${data.layout.pp}, VPP ${data.layout.vpp}, EP ${data.layout.ep}, ETP ${data.layout.etp}: ${data.layout.ranks} rank${many ? "s" : ""} hold${many ? "" : "s"} the model once` +
    (per.length ? `; ${per[0].length} experts of each layer on an expert rank` : "") + ". The numbers are those of one rank.";
  at("layout-text").textContent = text;
  svg.setAttribute("aria-label", text + " " + ranks.map(rank => `pp ${rank.pp_rank}: ${bytes(rank.bytes)}`).join(", "));
  const list = at("layout-legend");
  list.replaceChildren();
  key(list, "p1", "embedding");
  for (const [kind, [colour, name]] of Object.entries(LAYERS)) if (kinds.includes(kind)) key(list, colour, name);
  key(list, "p4", "head");
};
if (data.layout) at("layout-part").hidden = false;
