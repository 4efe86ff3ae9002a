"use strict";
for (const place of document.querySelectorAll(".results")) {
  const form = place.querySelector("form");
  const table = place.querySelector("table");
  const rows = [...table.tBodies[0].rows];
  const show = () => {
    const { text, ...chosen } = Object.fromEntries(new FormData(form));
    const words = text.toLowerCase().split(/\s+/);
    let count = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden =
        Object.entries(chosen).some(([key, value]) => value && row.dataset[key] !== value) ||
        !words.every((word) => content.includes(word));
      count += row.hidden ? 0 : 1;
    }
    place.querySelector("output").textContent = `${count} of ${rows.length} rows`;
  };
  const sort = (header) => {
    const isText = header.dataset.kind === "text";
    const [first, second] = isText ? ["ascending", "descending"] : ["descending", "ascending"];
    const order = header.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    const key = (row) => {
      const cell = row.cells[header.cellIndex];
      return "value" in cell.dataset ? cell.dataset.value : cell.textContent.trim();
    };
    const compare = (one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === "");  // nothing comes last
      return sign * (isText ? a.localeCompare(b) : a - b);
    };
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    table.tBodies[0].append(...rows.sort(compare));
  };
  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(header));
    header.append(button);
  }
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  show();
}
