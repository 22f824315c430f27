"use strict";
// Tables that sort by their heads, and filters for rows and cards. Works on the elements present when it is called.
const groupbenchTables = (() => {
  const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
  const compare = new Intl.Collator(undefined, { numeric: true }).compare;

  // Sorts by number if the cell has one; empty cells come last in either direction.
  function sort(table, column, down) {
    const body = table.tBodies[0];
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.sort === undefined ? cell.textContent.trim() : Number(cell.dataset.sort);
    };
    const rows = Array.from(body.rows, (row, place) => ({ row, place, key: key(row) }));
    rows.sort((a, b) => {
      if (a.key === "" || b.key === "") return (a.key === "") - (b.key === "") || a.place - b.place;
      const both = typeof a.key === "number" && typeof b.key === "number";
      const order = both ? a.key - b.key : compare(String(a.key), String(b.key));
      return (down ? -order : order) || a.place - b.place;
    });
    body.append(...rows.map(({ row }) => row));
  }

  function sortable(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(table, column, down);
      });
    });
  }

  function filter(input) {
    const told = input.parentElement.querySelector("output");
    const run = () => {
      const wanted = words(input.value);
      const items = document.querySelectorAll(input.dataset.filter);
      let shown = 0;
      for (const item of items) {
        const text = (item.dataset.words || item.textContent).toLowerCase();
        item.hidden = !wanted.every((word) => text.includes(word));
        shown += !item.hidden;
      }
      if (told) told.textContent = wanted.length ? shown + " of " + items.length : "";
    };
    input.addEventListener("input", run);
    return run;
  }

  function start(root) {
    root.querySelectorAll("table.sortable").forEach(sortable);
    root.querySelectorAll("input[data-filter]").forEach(filter);
  }

  return { start, words };
})();
