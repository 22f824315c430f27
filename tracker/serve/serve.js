"use strict";
// Draws the page's figures, makes its tables sortable, and keeps the address of a form short: empty fields stay out.
(() => {
  const button = document.getElementById("theme");
  const data = document.getElementById("figures");
  const figures = data ? JSON.parse(data.textContent) : {};
  groupbenchFigures.themes(button);
  for (const place of document.querySelectorAll("figure[data-figure]")) {
    groupbenchFigures.later(place, figures[place.dataset.figure]);
  }
  groupbenchTables.start(document);
  window.addEventListener("beforeprint", groupbenchFigures.toPaper);
  window.addEventListener("afterprint", groupbenchFigures.fromPaper);
  for (const form of document.querySelectorAll("form:not([method=post])")) {
    form.addEventListener("formdata", (event) => {
      for (const [name, value] of [...event.formData.entries()]) {
        if (value === "") event.formData.delete(name);
      }
    });
  }
})();
