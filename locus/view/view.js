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
  const theme = (node) => {
    const ink = getComputedStyle(node).color, line = "rgba(128, 128, 128, 0.4)";
    const words = { labelColor: ink, titleColor: ink, titleFontWeight: 500 };
    return {
      background: "transparent", view: { stroke: line }, legend: words, header: words, title: { color: ink },
      axis: { ...words, gridColor: line, domainColor: line, tickColor: line }, text: { color: ink },
    };
  };
  const chart = (panel, spec) => vegaEmbed(panel, spec, {
    renderer: "svg", config: theme(panel), actions: { export: true, source: false, compiled: false, editor: false },
  });
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
  const draw = async (view) => {
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
      view.dataset.drawn = "no";
    }
  };
  const all = () => document.querySelectorAll(".locus-view").forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.querySelectorAll(".locus-panel:not(.locus-paper)").forEach((panel) => {
      if (panel.closest("[data-drawn=yes]")) chart(panel, JSON.parse(panel.dataset.panel));
    });
  });
  all();
  new MutationObserver(all).observe(document.body, { childList: true, subtree: true });
})(PACKED);
