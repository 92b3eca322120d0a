(async (packed) => {
  if (window.locusViews) return;
  const state = (window.locusViews = { count: 0, drawn: 0, errors: [] });
  for (const text of packed) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.text = await new Response(stream).text();
    document.head.append(script);
  }
  // Charts take their ink from the page, so that they follow it into the dark and onto paper.
  const theme = (ink) => {
    const line = "rgba(128, 128, 128, 0.5)", words = { labelColor: ink, titleColor: ink, titleFontWeight: 500 };
    return {
      background: "transparent", view: { stroke: line }, legend: words, header: words, text: { color: ink },
      title: { color: ink, subtitleColor: ink }, axis: { ...words, gridColor: "rgba(128, 128, 128, 0.22)", domainColor: line, tickColor: line },
    };
  };
  const draw = (place, spec, ink) =>
    vegaEmbed(place, spec, { renderer: "svg", config: theme(ink), actions: false });
  const lines = (text, width) => text.match(new RegExp(`.{1,${Math.floor(width)}}(\\s|$)|\\S+`, "g")) ?? [""];
  // A picture that stands alone: dark on white, with the title and the caption of the figure.
  const svg = async (panel, spec) => {
    const figure = panel.closest("figure"), wide = panel.clientWidth;
    const titles = [figure.getAttribute("aria-label"), spec.title?.text ?? spec.title, figure.dataset.of].filter(Boolean);
    const caption = figure.querySelector(".locus-caption").textContent;
    const title = { text: titles.flatMap((t) => lines(t, wide / 8)), subtitle: lines(caption, wide / 6),
      anchor: "start", frame: "group", offset: 12 };
    const alone = { ...spec, title, background: "white", padding: 12 };
    if (spec.width === "container") alone.width = wide;
    const { view } = await draw(document.createElement("div"), alone, "#1c1c1e");
    const text = await view.toSVG();
    view.finalize();
    return text;
  };
  // The rows that a chart draws, each once; where it draws several tables, with the table's name.
  const csv = (spec) => {
    const rows = new Map();
    const walk = (part) => {
      for (const row of part.data?.values ?? []) {
        const named = part.data.name ? { table: part.data.name, ...row } : row;
        rows.set(JSON.stringify(named), named);
      }
      [...(part.layer ?? []), ...(part.concat ?? part.hconcat ?? part.vconcat ?? []), part.spec].filter(Boolean)
        .forEach(walk);
    };
    walk(spec);
    const names = [...new Set([...rows.values()].flatMap(Object.keys))];
    const cell = (value) => (/[",\r\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
    return [names, ...[...rows.values()].map((row) => names.map((name) => row[name]))]
      .map((row) => row.map(cell).join(",") + "\n").join("");
  };
  const chart = async (panel, spec) => {
    // In a place of its own: Vega takes the role and the words of the element that it draws in.
    panel.replaceChildren(document.createElement("div"));
    await draw(panel.firstChild, spec, "currentColor");
    const title = panel.closest("figure").getAttribute("aria-label");
    const save = (kind, words, type, make) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: kind });
      button.setAttribute("aria-label", `${words} of “${title}”`);
      button.addEventListener("click", async () => {
        const href = URL.createObjectURL(new Blob([await make(panel, spec)], { type }));
        const download = `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.${kind.toLowerCase()}`;
        Object.assign(document.createElement("a"), { href, download }).click();
        setTimeout(() => URL.revokeObjectURL(href), 1000);
      });
      return button;
    };
    const bar = Object.assign(document.createElement("div"), { className: "locus-save" });
    bar.append(save("SVG", "Picture", "image/svg+xml", svg), save("CSV", "Data", "text/csv", (_, spec) => csv(spec)));
    panel.after(bar);
  };
  const elements = async (panel, list) => {
    panel.classList.add("locus-paper");
    panel.replaceChildren(...list.map(({ label, name, props }) => {
      const row = document.createElement("div"), place = document.createElement("div");
      row.className = `locus-row locus-${name}`;
      if (label) row.append(Object.assign(document.createElement("b"), { textContent: label }));
      row.append(place);
      place.id = `locus-element-${++state.count}`;
      return row;
    }));
    const places = [...panel.children].map((row) => row.lastElementChild);
    list.forEach(({ name, props }, i) => CircuitsVis.render(places[i].id, CircuitsVis[name], props));
    // React draws when it has time to; where it fails, it leaves nothing.
    for (let waited = 0; places.some((place) => !place.firstElementChild); waited += 20) {
      if (waited > 20000) throw new Error(`${list[0].name} was not drawn`);
      await new Promise((done) => setTimeout(done, 20));
    }
  };
  const show = async (view) => {
    if (view.dataset.drawn) return;
    view.dataset.drawn = "began";
    try {
      for (const panel of view.querySelectorAll(".locus-panel")) {
        const spec = JSON.parse(panel.dataset.panel);
        await (Array.isArray(spec) ? elements : chart)(panel, spec);
      }
      view.querySelectorAll(".locus-picture").forEach((node) => node.remove());
      view.dataset.drawn = "yes";
      state.drawn += 1;
    } catch (error) {
      // The picture, or the words that stand for it, are still there.
      state.errors.push(String(error));
      view.querySelectorAll(".locus-panel").forEach((node) => node.replaceChildren());
      view.querySelectorAll(".locus-save").forEach((node) => node.remove());
      view.dataset.drawn = "no";
    }
  };
  const all = () => document.querySelectorAll(".locus-view").forEach(show);
  all();
  new MutationObserver(all).observe(document.body, { childList: true, subtree: true });
})(PACKED);
