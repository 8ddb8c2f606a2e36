// What a lesson's step has besides its text: a table, the answers to a question, and code with current lines.

import { h, text } from "./dom.mjs";

export function showRows(table, [head, ...body] = []) {
  const row = (cells, tag, props) => h("tr", {}, ...cells.map((cell) => h(tag, props, cell)));
  table.hidden = !head;
  table.replaceChildren();
  if (!head) return;
  const rows = body.map((cells) => row(cells, "td", {}));
  table.append(h("thead", {}, row(head, "th", { scope: "col" })), h("tbody", {}, ...rows));
}

export function showCode(list, code = [], current = []) {
  list.hidden = !code.length;
  list.replaceChildren(...code.map((line, i) => h("li", { "aria-current": current.includes(i) && "step" }, line)));
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
