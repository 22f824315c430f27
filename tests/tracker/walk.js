// Returns the faults of the current page that would confuse a screen reader; an empty list is a good page.
() => {
  const faults = [];
  const shown = (node) => node.checkVisibility();
  const text = (node) => (node.textContent || "").trim().slice(0, 40);
  const named = (node) => node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.labels?.length || text(node);
  const all = (selector) => Array.from(document.querySelectorAll(selector)).filter(shown);

  if (!document.documentElement.lang) faults.push("the page names no language");
  if (!document.title.trim()) faults.push("the page has no title");
  for (const landmark of ["header", "nav", "main"]) {
    if (!all(landmark).length) faults.push("no landmark " + landmark);
  }
  if (all("main").length > 1) faults.push("more than one main");
  const order = ["a.skip", "header", "main"].map((one) => document.querySelector(one));
  order.slice(1).forEach((node, i) => {
    if (!(order[i].compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING)) faults.push(node.tagName + " comes too early");
  });

  let level = 0;
  const headings = all("h1, h2, h3, h4, h5, h6");
  if (headings.filter((one) => one.tagName === "H1").length !== 1) faults.push("not one h1");
  for (const heading of headings) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) faults.push("h" + level + " is followed by h" + next + ": " + text(heading));
    if (!text(heading)) faults.push("an empty heading");
    level = next;
  }

  for (const table of all("table")) {
    if (!table.caption || !text(table.caption)) faults.push("a table without a caption");
    for (const head of table.querySelectorAll("th")) {
      if (!head.scope) faults.push("a head without a scope: " + text(head));
      if (!text(head)) faults.push("an empty head in " + text(table.caption));
    }
  }
  for (const node of all("[role=img]")) if (!node.getAttribute("aria-label")) faults.push("a plot without a text");
  for (const svg of all("svg")) {
    if (!svg.closest("[role=img], [aria-hidden=true]") && !svg.getAttribute("aria-label")) faults.push("an svg without a text");
  }
  for (const node of all("input:not([type=hidden]), select, button, a[href], [role=region], nav, summary")) {
    if (!named(node)) faults.push("without a name: " + node.outerHTML.slice(0, 80));
  }
  for (const node of all("[tabindex]")) if (node.tabIndex > 0) faults.push("a tabindex of " + node.tabIndex);
  const ids = Array.from(document.querySelectorAll("[id]"), (node) => node.id).filter((id) => !id.includes("clip"));
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) faults.push("two nodes with the id " + id);
  return faults;
}
