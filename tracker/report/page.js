"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("plots");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  // Plotly reads a few tags in text: names and messages must not become markup.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function middle(values) {
    const known = values.filter((v) => v !== null).sort((a, b) => a - b);
    return known.length ? known[Math.floor(known.length / 2)] : null;
  }

  function traces(series, values, low, high, axis, name, ink) {
    const good = { x: [], y: [], text: [], up: [], down: [] };
    const bad = { x: [], y: [], text: [] };
    const typical = middle(values);
    series.x.forEach((run, i) => {
      const status = series.status[i] || "ok";
      const value = values[i];
      const told = series.message[i] ? ": " + plain(series.message[i]) : "";
      const shown = value === null ? "" : "<br>" + value.toPrecision(4) + " " + name;
      const at = data.runs[run];
      const text = plain(at[0]) + " · " + plain(at[1]) + "<br>" + plain(at[2]) + shown +
        (status === "ok" ? "" : "<br>" + plain(status) + told);
      if (status !== "ok") {
        if (value === null && typical === null) return;
        bad.x.push(run); bad.y.push(value === null ? typical : value); bad.text.push(text);
      } else if (value !== null) {
        good.x.push(run); good.y.push(value); good.text.push(text);
        good.up.push(high ? high[i] - value : 0); good.down.push(low ? value - low[i] : 0);
      }
    });
    const common = { hovertemplate: "%{text}<extra></extra>", xaxis: "x" + axis, yaxis: "y" + axis };
    return [
      {
        ...common, type: "scatter", mode: "lines+markers", x: good.x, y: good.y, text: good.text,
        line: { color: ink, width: 1.2 }, marker: { color: ink, size: 5 },
        error_y: high
          ? { type: "data", array: good.up, arrayminus: good.down, color: ink, thickness: 1, width: 2 }
          : undefined,
      },
      {
        ...common, type: "scatter", mode: "markers", x: bad.x, y: bad.y, text: bad.text,
        marker: { color: colour("bad"), size: 9, symbol: "x" },
      },
    ];
  }

  // Noise of a thousandth must not fill the plot: never less than `share` of the typical value to each side.
  function range(lists, share) {
    const known = lists.flat().filter((v) => v !== null);
    const typical = middle(known);
    if (typical === null) return undefined;
    const low = Math.min(...known, typical * (1 - share)), high = Math.max(...known, typical * (1 + share));
    return [low - 0.06 * (high - low), high + 0.12 * (high - low)];
  }

  function draw(box, series) {
    const line = colour("line"), text = colour("text");
    const first = series.x[0], last = series.x[series.x.length - 1];
    const step = Math.max(1, Math.ceil(series.x.length / 6));
    const ticks = series.x.filter((_, i) => i % step === 0);
    const axis = {
      gridcolor: line, linecolor: line, zeroline: false, tickvals: ticks, tickfont: { size: 10 }, tickangle: 0,
      ticktext: ticks.map((run) => plain(data.runs[run][0].slice(0, 7))), range: [first - 0.6, last + 0.6],
    };
    const scale = { gridcolor: line, zeroline: false, tickfont: { size: 10 }, automargin: true };
    const changes = series.environments.flatMap(([run, what]) => ["", "2"].map((n) => ({
      type: "line", xref: "x" + n, yref: "y" + n + " domain", x0: run - 0.5, x1: run - 0.5, y0: 0, y1: 1,
      line: { color: colour("warn"), width: 1, dash: "dot" },
      label: n ? undefined : {
        text: plain(what.length > 60 ? what.slice(0, 59) + "…" : what), textposition: "end", textangle: 0,
        xanchor: run > (first + last) / 2 ? "right" : "left", yanchor: "top",
        font: { size: 10, color: colour("warn") },
      },
    })));
    Plotly.react(box, [
      ...traces(series, series.ms, series.low, series.high, "", "ms", colour("series")),
      ...traces(series, series.rms, null, null, "2", "relative RMS", colour("accuracy")),
    ], {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 11 },
      margin: { l: 55, r: 10, t: 12, b: 28 }, showlegend: false, hovermode: "closest", shapes: changes,
      grid: { rows: 1, columns: 2, pattern: "independent" },
      xaxis: { ...axis, domain: [0, 0.6] },
      xaxis2: { ...axis, domain: [0.68, 1] },
      yaxis: { ...scale, range: range([series.ms, series.low, series.high], 0.03), title: { text: series.interpreted ? "ms, interpreted: no speed" : "ms", standoff: 4 } },
      yaxis2: { ...scale, range: range([series.rms], 0.25), title: { text: "relative RMS", standoff: 4 }, exponentformat: "e" },
    }, { displayModeBar: false, responsive: true });
  }

  const drawn = new Map();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      const series = data.series[Number(entry.target.dataset.series)];
      drawn.set(entry.target, series);
      draw(entry.target, series);
    }
  }, { rootMargin: "300px" });

  data.series.forEach((series, i) => {
    const article = document.createElement("article");
    const title = document.createElement("h3");
    title.textContent = series.name[0] + " ";
    const rest = document.createElement("span");
    rest.textContent = series.name.slice(1).join(" · ");
    title.append(rest);
    article.append(title);
    if (series.ms.some((v) => v !== null) || series.rms.some((v) => v !== null)) {
      const box = document.createElement("div");
      box.className = "plot";
      box.dataset.series = String(i);
      article.append(box);
      watcher.observe(box);
    } else {
      const empty = document.createElement("p");
      empty.className = "empty";
      const end = series.x.length - 1;
      empty.textContent = "No result: " + series.status[end] + (series.message[end] ? ": " + series.message[end] : "");
      article.append(empty);
    }
    place.append(article);
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawn.forEach((series, box) => draw(box, series));
  });

  for (const input of document.querySelectorAll("input[data-filter]")) {
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const item of document.querySelectorAll(input.dataset.filter)) {
        const title = item.querySelector("h3") || item;
        const text = title.textContent.toLowerCase();
        item.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
})();
