"use strict";
// The index of all series, which a report of many series has: words are searched, and the first matches listed.
const groupbenchIndex = (() => {
  const LISTED = 200;

  function start() {
    const stored = document.getElementById("index-data");
    if (!stored) return;
    const { names, verdicts, rows } = JSON.parse(stored.textContent);
    const input = document.getElementById("index-words");
    const output = input.parentElement.querySelector("output");
    const body = document.getElementById("index").tBodies[0];
    const links = new Map(Array.from(document.querySelectorAll("#operators a"), (link) => [link.textContent, link.hash]));
    const fields = (row) => names.map((list, i) => list[row[i]]);
    const texts = rows.map((row) => [verdicts[row[5]][0], ...fields(row)].join(" ").toLowerCase());

    function line(row) {
      const [operator, backend, ...problem] = fields(row);
      const [, , , , , verdict, latency, speedup, key, full] = row;
      const line = document.createElement("tr");
      const add = (text, style) => {
        const cell = line.insertCell();
        cell.className = style || "";
        cell.textContent = text;
        return cell;
      };
      add(...verdicts[verdict]);
      add(operator);
      const place = add(full ? "" : backend);
      if (full) {
        const link = document.createElement("a");
        link.href = links.get(operator) + "/s" + key;
        link.textContent = backend;
        place.append(link);
      }
      add(problem[0], "shape");
      add(problem[1]);
      add(problem[2]);
      add(latency ?? "", "number");
      add(speedup === null ? "" : speedup + "×", "number");
      add(key, "number");
      return line;
    }

    function list() {
      const words = groupbenchTables.words(input.value);
      const listed = [];
      let found = 0;
      texts.forEach((text, i) => {
        if (!words.every((word) => text.includes(word))) return;
        found += 1;
        if (found <= LISTED) listed.push(line(rows[i]));
      });
      body.replaceChildren(...listed);
      const some = found > LISTED ? ", the first " + LISTED + " are listed" : "";
      output.textContent = found.toLocaleString("en") + " of " + rows.length.toLocaleString("en") + some;
    }

    input.addEventListener("input", list);
    list();
  }

  return { start };
})();
