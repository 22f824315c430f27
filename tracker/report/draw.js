"use strict";
// Figures of figures/, drawn by plotly in the colours of the page, each with its data as a table.
const groupbenchFigures = (() => {
  const DATA = new Set(["x", "y", "z", "text", "customdata", "hovertext", "array", "arrayminus", "tickvals", "ticktext"]);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colours are named as in the style sheet: "var(--series)". Long lists of data contain no names.
  function themed(value, key) {
    if (typeof value === "string") return value.startsWith("var(") ? colour(value.slice(4, -1)) : value;
    if (value === null || typeof value !== "object" || DATA.has(key)) return value;
    if (Array.isArray(value)) return value.map((item) => themed(item));
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
  }

  // `runs` is a list of [text, short name]; figures that do not repeat these say so.
  function filled(trace, runs) {
    if (trace.meta !== "runs" || !runs) return trace;
    const own = trace.text || [];
    return { ...trace, text: trace.x.map((run, i) => runs[run][0] + (own[i] ? "<br>" + own[i] : "")) };
  }

  function axis(given, runs) {
    const line = colour("--line");
    const all = {
      gridcolor: line, linecolor: line, zeroline: false, tickfont: { size: 10 }, ...themed(given || {}),
    };
    if (runs && all.tickvals && !all.ticktext) all.ticktext = all.tickvals.map((run) => runs[run][1]);
    return all;
  }

  // On a phone the names of problems would leave no room for their cells: there the names are above the cells.
  const NARROW = 600;
  function stacked(figure) {
    const { layout, data: [map, ...others] } = figure;
    const names = layout.yaxis.ticktext, [bottom] = layout.yaxis.range;
    const labels = names.map((text, row) => ({
      text, x: -0.5, y: row - 0.5, xanchor: "left", yanchor: "middle", yshift: -2, showarrow: false, font: { size: 10 },
    }));
    const height = layout.height + 18 * names.length + 12;
    const less = layout.margin.l - 8;
    return {
      data: [{ ...map, ygap: 18 }, ...others],
      layout: {
        ...layout, height, annotations: labels, margin: { ...layout.margin, l: 8 },
        yaxis: { ...layout.yaxis, showticklabels: false, range: [bottom, -0.8] },
        meta: { ...layout.meta, min_width: layout.meta.min_width - less },
      },
    };
  }
  // Words at a mark in the middle would run over the edge of a phone: there they keep to the edges of the plot.
  function held(figure) {
    const { layout } = figure;
    const annotations = (layout.annotations || []).map((label) => ({ ...label, xref: "x domain", x: label.xanchor === "right" ? 1 : 0 }));
    return { ...figure, layout: { ...layout, annotations } };
  }
  const NARROWED = { heatmap: stacked, history: held };
  const fitting = (figure, width) => width < NARROW ? (NARROWED[figure.layout.meta.kind] || ((same) => same))(figure) : figure;

  function draw(canvas, figure, runs) {
    const { meta, xaxis, yaxis, ...rest } = figure.layout;
    const touch = matchMedia("(pointer: coarse)").matches;
    const drawn = Plotly.react(canvas, figure.data.map((trace) => themed(filled(trace, runs))), {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { color: colour("--text"), size: 11, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" },
      dragmode: touch ? false : "zoom",
      ...themed(rest), xaxis: axis(xaxis, runs), yaxis: axis(yaxis, runs),
    }, { displayModeBar: false });
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");  // where plotly measures texts
    return drawn;
  }

  const plainText = (text) => new DOMParser().parseFromString(String(text).replace(/<br>/g, " · "), "text/html").documentElement.textContent;
  const cellText = (value) => typeof value === "number" ? Number(value.toPrecision(5)).toString() : plainText(value ?? "");

  const TABLES = {
    heatmap({ data: [map, lacking], layout }) {
      const rows = layout.yaxis.ticktext.map((name, i) => [name, ...map.text[i]]);
      (lacking ? lacking.x : []).forEach((x, i) => { rows[lacking.y[i]][x + 1] = lacking.text[i]; });
      return [["problem", ...layout.xaxis.ticktext], rows];
    },
    roofline({ data }) {
      const rows = data.slice(1).flatMap((trace) => trace.x.map((x, i) =>
        [trace.name, trace.text[i], x, trace.y[i], ...trace.customdata[i]]));
      return [["backend", "problem", "FLOP/byte", "TFLOP/s", "GB/s", "% of ceiling"], rows];
    },
    history({ data, layout }, runs) {
      const rows = data.filter((trace) => trace.mode !== "lines").flatMap((given) => {
        const trace = filled(given, runs);
        const toolchain = trace.legendgroup;  // of those measured in turns
        const ok = trace.name === "ok" || (toolchain !== undefined && trace.name === toolchain);
        const mark = !ok && trace.name !== "not ok";
        return trace.x.map((x, i) => [x, mark ? runs?.[Math.ceil(x)]?.[0] ?? "" : trace.text[i], ...(layout.showlegend ? [toolchain ? trace.customdata[i] : ""] : []), ok ? trace.y[i] : "", mark ? trace.name + ": " + trace.text[i] : ""]);
      });
      const head = ["run", ...(layout.showlegend ? ["toolchain"] : []), layout.yaxis.title.text, "what happened"];
      return [head, rows.sort((a, b) => a[0] - b[0]).map((row) => row.slice(1))];
    },
    backends({ data }) {
      const rows = data.flatMap((trace) => trace.x.map((x, i) => [x, trace.name, trace.text[i], trace.y[i]]));
      return [["backend", "run", "ms"], rows.sort((a, b) => a[0] - b[0]).map((row) => row.slice(1))];
    },
    bursts({ data }) {
      const rows = data.filter((trace) => trace.type === "box").flatMap((trace) => [...new Set(trace.x)].map((burst) => {
        const values = trace.y.filter((_, i) => trace.x[i] === burst).sort((a, b) => a - b);
        return [trace.name, burst, values.length, values[0], values[Math.floor(values.length / 2)], values[values.length - 1]];
      }));
      return [["run", "burst", "samples", "least, ms", "median, ms", "most, ms"], rows];
    },
  };

  function dataTable(figure, runs) {
    const [head, rows] = TABLES[figure.layout.meta.kind](figure, runs);
    const table = document.createElement("table");
    table.createCaption().textContent = "Data of the plot";
    table.caption.className = "unseen";
    const top = table.createTHead().insertRow();
    for (const name of head) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = plainText(name);
      top.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const value of row) {
        const cell = line.insertCell();
        cell.textContent = cellText(value);
        if (typeof value === "number") cell.className = "number";
      }
    }
    return table;
  }

  // Into an empty <figure>: the plot, and below it the same in figures, made when it is opened.
  const shown = new Map();
  // A box also changes its width without the window, or with it while its page is hidden: plotly would miss both.
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      for (const held of shown.values()) {
        if (held.canvas.parentElement !== target) continue;
        clearTimeout(held.waits);
        held.waits = setTimeout(() => follow(held), 60);
      }
    }
  });
  function follow(held) {
    const width = held.canvas.parentElement.clientWidth;
    if (!width || width === held.width) return;
    fit(held);
    Plotly.Plots.resize(held.canvas);
  }
  function show(place, figure, runs) {
    let held = shown.get(place);
    if (!held) {
      const box = document.createElement("div");
      const canvas = document.createElement("div");
      box.className = "scroll";
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "Plot");
      canvas.setAttribute("role", "img");
      box.append(canvas);
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      const inner = document.createElement("div");
      summary.textContent = "Data as a table";
      inner.className = "scroll";
      inner.tabIndex = 0;
      inner.setAttribute("role", "region");
      inner.setAttribute("aria-label", "Data of the plot");
      details.append(summary, inner);
      place.replaceChildren(box, details);
      held = { canvas, details, inner };
      details.addEventListener("toggle", () => {
        if (details.open) inner.replaceChildren(dataTable(held.figure, held.runs));
      });
      shown.set(place, held);
      sizes.observe(box);
    }
    Object.assign(held, { figure, runs });
    held.canvas.setAttribute("aria-label", figure.layout.meta.alt);
    if (held.details.open) held.inner.replaceChildren(dataTable(figure, runs));
    return fit(held);
  }

  function fit(held) {
    const { canvas, figure, runs } = held;
    held.width = canvas.parentElement.clientWidth;
    const fitted = fitting(figure, held.width);
    const { kind, min_width: least } = fitted.layout.meta;
    if (least) canvas.parentElement.tabIndex = 0;  // it may have to be scrolled
    canvas.style.minWidth = least ? least + "px" : "";
    canvas.style.maxWidth = kind === "heatmap" ? least * 1.6 + "px" : "";
    canvas.style.height = fitted.layout.height + "px";
    return draw(canvas, fitted, runs);
  }

  // Draws all figures in the colours of another theme; `refresh` draws those of hidden pages once they are visible.
  const visible = ({ canvas }) => canvas.offsetParent !== null;
  function redraw() {
    shown.forEach((held) => { held.stale = true; });
    refresh();
  }
  function refresh() {
    shown.forEach((held) => {
      if (!held.stale || !visible(held)) return;
      held.stale = false;
      fit(held);
    });
  }
  // Drawn once it comes near the window; until then it takes its room.
  const waiting = new Map();
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) drawWaiting(target);
    }
  }, { rootMargin: "400px" });
  function drawWaiting(place) {
    watcher.unobserve(place);
    const [figure, runs] = waiting.get(place);
    waiting.delete(place);
    place.style.minHeight = "";
    show(place, figure, runs);
  }
  function later(place, figure, runs) {
    place.style.minHeight = figure.layout.height + 24 + "px";
    waiting.set(place, [figure, runs]);
    watcher.observe(place);
  }

  // Light or dark: as the system has it, unless the reader chose with the button.
  function themes(button) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const root = document.documentElement;
    let chosen = null;
    try { chosen = localStorage.getItem("groupbench-theme"); } catch { /* a file may have no storage */ }
    const apply = () => {
      if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen; else delete root.dataset.theme;
      const now = chosen || (dark.matches ? "dark" : "light");
      button.textContent = now === "dark" ? "☀ Light" : "☾ Dark";
      button.setAttribute("aria-label", now === "dark" ? "Switch to the light theme" : "Switch to the dark theme");
      redraw();
    };
    button.addEventListener("click", () => {
      const now = chosen || (dark.matches ? "dark" : "light");
      chosen = now === "dark" ? "light" : "dark";
      try { localStorage.setItem("groupbench-theme", chosen); } catch { /* it lasts as long as the page */ }
      apply();
    });
    dark.addEventListener("change", apply);
    apply();
  }

  // On paper nothing scrolls: draw the figures that are waiting, and shrink those larger than a page.
  const PAPER = { width: 680, height: 940, least: 0.35 };
  function toPaper() {
    for (const place of [...waiting.keys()]) if (place.offsetParent !== null) drawWaiting(place);
    refresh();
    for (const { canvas } of shown.values()) {
      const { offsetWidth: width, offsetHeight: height } = canvas;
      if (width) canvas.style.zoom = Math.max(PAPER.least, Math.min(1, PAPER.width / width, PAPER.height / height));
    }
  }
  function fromPaper() {
    for (const { canvas } of shown.values()) canvas.style.zoom = "";
  }

  return { show, later, redraw, refresh, themes, toPaper, fromPaper };
})();
