// The treemap: the area of a module is its share of the bytes, cut along the longer side.
const SORTS = [[/expert/, "p3", "experts"], [/attn|attention|mixer|mamba|linear/, "p0", "attention and other mixers"], [/mlp|ffn|feed|router/, "p2", "dense MLP and router"], [/embed|head|wte|output|lm_/, "p1", "embedding and head"], [/./, "p5", "other"]];
const sortOf = name => SORTS.find(([pattern]) => pattern.test(name)) ?? SORTS.at(-1);
const HEIGHT = 420, STRIP = 18;
const drawMap = () => {
  const svg = at("map"), width = sheet(svg, HEIGHT), used = new Set(), whole = data.tree.bytes || 1;
  const label = (words, x, y, w, kind) => {
    const fitting = words.find(text => w > 7 * text.length + 8);
    if (fitting) draw("text", svg, { x: x + 5, y, class: kind }, fitting);
  };
  const cut = (module, name, x, y, w, h, depth) => {
    if (w < 1 || h < 1) return;
    // An only child shares its parent's strip: `layers.0-31`.
    if (depth && module.modules.length === 1 && module.modules[0].bytes === module.bytes) {
      const [only] = module.modules;
      return cut({ ...only, name: `${module.name}.${only.name}` }, `${name}.${only.name}`, x, y, w, h, depth);
    }
    const inner = module.modules, total = inner.reduce((sum, one) => sum + one.bytes, 0), leaf = !total || depth > 5;
    const size = bytes(module.bytes), share = percent(module.bytes / whole);
    const [, kind, sort] = sortOf(name);
    const box = draw("rect", svg, { x, y, width: w, height: h, ...(leaf ? { class: kind } : { fill: "var(--shade)" }), stroke: "var(--paper)" });
    draw("title", box, {}, `${name || "model"}: ${count(module.parameters)} parameters, ${size}, ${share}`);
    if (leaf) {
      used.add(sort);
      if (h > 18) label([module.name], x, y + 14, w, "on");
      if (h > 36) label([`${size}, ${share}`, size, share], x, y + 30, w, "on small");
      return;
    }
    const strip = depth && h > 46 && w > 46 ? STRIP : 0;
    if (strip) label([`${module.name} · ${size}`, module.name], x, y + 13, w, "soft");
    const wide = w > h - strip;
    let offset = 0;
    for (const one of [...inner].sort((a, b) => b.bytes - a.bytes)) {
      const step = one.bytes / total * (wide ? w : h - strip), path = name ? name + "." + one.name : one.name;
      if (wide) cut(one, path, x + offset, y + strip, step, h - strip, depth + 1);
      else cut(one, path, x, y + strip + offset, w, step, depth + 1);
      offset += step;
    }
  };
  cut(data.tree, "", 0, 0, width, HEIGHT, 0);
  const largest = [...data.tree.modules].sort((a, b) => b.bytes - a.bytes).slice(0, 3);
  svg.setAttribute("aria-label", `treemap of ${bytes(data.tree.bytes)}: ` + largest.map(one => `${one.name} ${percent(one.bytes / whole)}`).join(", "));
  at("map-legend").replaceChildren();
  for (const [, kind, sort] of SORTS) if (used.has(sort)) key(at("map-legend"), kind, sort);
};
