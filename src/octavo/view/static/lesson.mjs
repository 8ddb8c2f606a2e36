// What a lesson's step has besides its text: a table with a slider, the answers to a question, and code with current lines.

import { $, h, text } from "./dom.mjs";

export function showRows(table, [head, ...body] = []) {
  const row = (cells, tag, props) => h("tr", {}, ...cells.map((cell) => h(tag, props, cell)));
  table.hidden = !head;
  table.replaceChildren();
  if (!head) return;
  const rows = body.map((cells) => row(cells, "td", {}));
  table.append(h("thead", {}, row(head, "th", { scope: "col" })), h("tbody", {}, ...rows));
}

// The slider chooses one of the histories `stops`, each of which has a row of the table. Cells are bars as well.
export function showStops(box, table, { stops = [], rows = [], history }, onStop) {
  box.hidden = !stops.length;
  if (box.hidden) return;
  const cells = [...table.tBodies[0].rows].map((row) => [...row.cells]);
  const value = (cell) => parseFloat(cell.textContent.replace(",", ""));
  for (const cell of cells.flatMap((row) => row.slice(1))) {
    const most = Math.max(...cells.map((row) => value(row[cell.cellIndex])));
    cell.style.setProperty("--share", `${(100 * value(cell)) / most}%`);
  }
  const slider = $("input", box);
  const mark = () => {
    slider.setAttribute("aria-valuetext", `${rows[Number(slider.value) + 1][0]} tokens`);
    cells.forEach(([{ parentElement: row }], i) => row.classList.toggle("chosen", i === Number(slider.value)));
  };
  slider.max = stops.length - 1;
  slider.value = stops.indexOf(history);
  slider.oninput = () => {
    mark();
    onStop(stops[slider.value]);
  };
  mark();
}

// Each function is a list of its own.
export function showCode(section, code = [], current = []) {
  section.hidden = !code.length;
  const lists = [];
  code.forEach((line, i) => {
    if (!i || line.startsWith("def ")) lists.push(h("ol"));
    lists.at(-1).append(h("li", { "aria-current": current.includes(i) && "step" }, line));
  });
  section.lastElementChild.replaceChildren(...lists);
}

// `onRight` is called at the first right answer. A wrong one can be followed by another.
export function showChoices(box, look, { choices = [], answer, look: reason }, onRight) {
  box.hidden = !choices.length;
  box.replaceChildren();
  text(look, choices.length ? "" : reason);
  let isDone = false;
  choices.forEach((choice, i) => {
    const choose = () => {
      const isRight = i === answer;
      button.dataset.right = isRight;
      text(button, `${isRight ? "✓" : "✗"} ${choice}`);
      if (isDone) return;
      text(look, isRight ? reason : "Not this one. The grid and the tables show what there is now.");
      isDone = isRight;
      if (isRight) onRight();
    };
    const button = h("button", { type: "button", onclick: choose }, choice);
    box.append(button);
  });
}
