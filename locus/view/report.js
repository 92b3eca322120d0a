// A click on a column's name sorts its table: numbers by size, words by letter, "–" last; a second click turns it over.
for (const table of document.querySelectorAll(".table table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column], text = cell.textContent.trim();
    if (!cell.classList.contains("n")) return text;
    const found = text.replaceAll(",", "").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? Number(found[0]) : "";
  };
  heads.forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "sort" });
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) => {
        if (a === "" || b === "" || a === "–" || b === "–") return (a === "" || a === "–") - (b === "" || b === "–");
        return down * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
