// `diff`: a table of modules, and a map of layers and kinds of tensors whose colour says how far they have moved.
const STEPS = 9;
// The scale of some values: linear, or logarithmic over at most four decades if they differ widely.
const scaleOf = values => {
  const positive = values.filter(value => value > 0), high = Math.max(...positive), low = Math.max(Math.min(...positive), high * 1e-4);
  const logarithmic = high / low > 30;
  const bound = step => logarithmic ? low * (high / low) ** (step / STEPS) : high * step / STEPS;
  const stepOf = value => {
    const share = logarithmic ? Math.log(value / low) / Math.log(high / low) : value / high;
    return Math.max(0, Math.min(STEPS - 1, Math.floor(share * STEPS)));
  };
  return { any: positive.length > 0, logarithmic, bound, stepOf };
};
const drawScale = (scale, measure, odd) => {
  const place = at("heat-scale");
  place.replaceChildren();
  if (scale.any) {
    const words = make("span", place, data.measures[measure] + (scale.logarithmic ? ", logarithmic" : "") + ":");
    const steps = make("span", place, undefined, "steps");
    for (let step = 0; step < STEPS; step++) {
      const one = make("span", steps);
      make("i", one, undefined, "h" + step);
      const bound = scale.bound(step);
      if (step % 2 === 0) one.append(measure === "changed" ? percent(bound) : bound ? Number(bound.toPrecision(2)).toExponential().replace("e+0", "") : "0");
    }
  }
  const sample = (kind, text) => { const one = make("span", place); make("span", one, undefined, "key " + kind); one.append(text); };
  sample("equal", "equal");
  if (odd) sample("odd", "not finite, or A is zero");
};
const drawHeat = () => {
  const measure = at("heat-measure").value, place = at("heat");
  const cells = data.maps.flatMap(map => map.rows.flatMap(row => row.cells)).filter(cell => cell);
  const values = cells.map(cell => valueOf(cell, measure)), scale = scaleOf(values.filter(Number.isFinite));
  drawScale(scale, measure, values.some(value => !Number.isFinite(value)));
  place.replaceChildren();
  const label = innerWidth < 560 ? 120 : 230;
  for (const map of data.maps) {
    const table = make("table", make("div", place, undefined, "scroll"), undefined, "heat");
    const room = (place.clientWidth - label) / map.layers.length, each = Math.max(9, Math.min(72, room));
    table.style.width = label + each * map.layers.length + "px";
    const body = make("tbody", table), head = make("tr", body), every = Math.max(1, Math.ceil(26 / each));
    make("th", head, map.name).style.width = label + "px";
    map.layers.forEach((layer, index) => make("th", head, index % every ? "" : layer, "layer").scope = "col");
    let module = null;
    for (const row of map.rows) {
      if (row.module !== module) {
        const line = make("tr", body), name = make("th", line, row.module, "module");
        name.scope = "rowgroup"; name.colSpan = map.layers.length + 1; module = row.module;
      }
      const line = make("tr", body), name = make("th", line, row.name);
      name.scope = "row"; name.title = row.kind;
      row.cells.forEach((cell, index) => {
        if (!cell) { make("td", line); return; }
        const value = valueOf(cell, measure), kind = value === 0 ? "equal" : Number.isFinite(value) ? "h" + scale.stepOf(value) : "odd";
        const text = value === 0 ? "equal" : shownOf(value, measure);
        make("td", line, text, kind).title = `layer ${map.layers[index]}, ${row.kind}: ${text}`;
      });
    }
  }
};
const MODULES = [["module", ""], ["tensors", "n"], ["different", "n"], ["only in A", "n"], ["only in B", "n"], ["|A−B| / |A|", "n"], ["largest |A−B|", "n"], ["changed", "n"]];
const moduleCells = row => [
  count(row.tensors), row.different ? count(row.different) : "–", row.only_a || "–", row.only_b || "–",
  ...["relative", "max_abs", "changed"].map(measure => row.stats && valueOf(row.stats, measure) !== 0 ? shownOf(valueOf(row.stats, measure), measure) : "–"),
];
const drawModules = () => {
  const table = at("modules"), head = make("tr", make("thead", table));
  for (const [name, kind] of MODULES) make("th", head, name, kind).scope = "col";
  for (const module of data.modules) {
    const body = make("tbody", table), line = make("tr", body), name = make("th", line);
    name.scope = "row";
    const button = make("button", name, "▸ " + module.name), inner = [];
    button.type = "button";
    for (const text of moduleCells(module)) make("td", line, text, "n");
    for (const kind of module.kinds) {
      const row = make("tr", body), cell = make("td", row, kind.name);
      cell.style.paddingLeft = "1.6rem";
      for (const text of moduleCells(kind)) make("td", row, text, "n");
      inner.push(row);
      for (const note of kind.notes) { const line = make("tr", body), cell = make("td", line, note, "soft"); cell.colSpan = MODULES.length; cell.style.paddingLeft = "2.6rem"; inner.push(line); }
    }
    const show = open => { inner.forEach(row => { row.hidden = !open; }); button.setAttribute("aria-expanded", open); button.textContent = (open ? "▾ " : "▸ ") + module.name; };
    button.onclick = () => show(button.getAttribute("aria-expanded") !== "true");
    show(false);
  }
};
if (data.modules.length) {
  at("module-part").hidden = false;
  drawModules();
}
if (data.maps.length) {
  at("heat-part").hidden = false;
  for (const [measure, text] of Object.entries(data.measures)) choice(at("heat-measure"), measure, text);
  at("heat-measure").onchange = drawHeat;
}
