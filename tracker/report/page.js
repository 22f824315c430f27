"use strict";
// Pages within the page, by the part of the address after #; those of operators are made when they are opened.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const runs = read("runs");
  const sections = Array.from(document.querySelectorAll("main > section"));
  const links = Array.from(document.querySelectorAll("nav a"));
  const title = document.title;
  const built = new Set();

  // Plots are made when the card is opened: a hundred histories are a list first.
  function fold(article, head, content) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.append(head);
    details.append(summary);
    details.addEventListener("toggle", () => { if (details.open) fill(); });
    const fill = () => { if (content) { details.append(...content()); content = null; } };
    article.unfold = () => { fill(); details.open = true; };
    article.append(details);
  }

  function card(series, folded) {
    const article = document.createElement("article");
    article.id = "s" + series.id;
    article.tabIndex = -1;
    article.dataset.words = [series.backend, series.rest, series.verdict || "not in this run"].join(" ");
    const head = document.createElement("h4");
    const rest = document.createElement("span");
    const tag = document.createElement("b");
    rest.textContent = series.rest;
    tag.textContent = series.verdict || "not in this run";
    tag.className = "tag " + series.tone;
    head.append(series.backend + " ", tag, " ", rest);
    if (series.none !== undefined) {
      const empty = document.createElement("p");
      empty.className = "note";
      empty.textContent = "No result: " + series.none;
      article.append(head, empty, ...command(series));
      return article;
    }
    const content = () => [plots(series), ...command(series)];
    if (folded) fold(article, head, content); else article.append(head, ...content());
    return article;
  }

  function command(series) {
    if (!series.repro) return [];
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    const code = document.createElement("code");
    summary.textContent = "Measure it again";
    code.textContent = series.repro;
    details.className = "note";
    details.append(summary, code);
    return [details];
  }

  function plots(series) {
    const plots = document.createElement("div");
    plots.className = "plots";
    const all = [["latency", "Latency"], ["bursts", "Bursts"], ["accuracy", "Accuracy"]].map(
      ([name, caption]) => [name, caption, series[name]]);
    for (const [caption, figure] of series.further || []) all.push(["further", caption, figure]);
    for (const [name, caption, shown] of all) {
      if (!shown) continue;
      const part = document.createElement("div");
      const heading = document.createElement("h5");
      const figure = document.createElement("figure");
      part.className = name;
      heading.textContent = caption;
      part.append(heading, figure);
      plots.append(part);
      groupbenchFigures.later(figure, shown, runs);
    }
    return plots;
  }

  function build(section) {
    const held = document.getElementById("data-" + section.id);
    if (!held || built.has(section)) return;
    built.add(section);
    const data = JSON.parse(held.textContent);
    for (const select of section.querySelectorAll("select[data-map]")) {
      const place = section.querySelector('[data-figure="map-' + select.dataset.map + '"]');
      const draw = () => groupbenchFigures.show(place, data.maps[Number(select.dataset.map)][select.value], runs);
      select.addEventListener("change", draw);
      draw();
    }
    const roof = section.querySelector('[data-figure="roofline"]');
    if (roof) groupbenchFigures.later(roof, data.roofline, runs);
    const list = section.querySelector(".series");
    list.append(...data.series.map((series) => card(series, "folded" in list.dataset)));
    section.querySelector(".unfold")?.addEventListener("click", () => {
      for (const article of list.children) if (!article.hidden) article.unfold?.();
    });
  }

  function go(moved) {
    const [wanted, series] = location.hash.slice(1).split("/");
    const section = sections.find((one) => one.id === wanted) || sections[0];
    for (const one of sections) one.classList.toggle("current", one === section);
    for (const link of links) {
      if (link.hash === "#" + section.id) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    document.title = section === sections[0] ? title : section.querySelector("h2").textContent + " · " + title;
    build(section);
    groupbenchFigures.refresh();
    const found = series && /^s\d+$/.test(series) && section.querySelector("#" + series);
    if (found) {
      found.hidden = false;
      found.unfold?.();
      found.scrollIntoView({ block: "start" });
      found.focus({ preventScroll: true });
    } else if (moved) {
      window.scrollTo(0, 0);
      section.querySelector("h2").focus({ preventScroll: true });
    }
  }

  // Paper shows every page, each with its maps.
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    sections.forEach(build);
    groupbenchFigures.toPaper();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    groupbenchFigures.fromPaper();
  });

  document.documentElement.classList.add("paged");
  groupbenchTables.start(document);
  groupbenchIndex.start();
  groupbenchFigures.themes(document.getElementById("theme"));
  window.addEventListener("hashchange", () => { if (location.hash !== "#content") go(true); });
  go(false);
})();
