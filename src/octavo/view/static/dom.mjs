// A few functions instead of a framework: create elements, and update a list of them from data.

// h("li", { class: "row", onclick: f, "data-id": 3 }, "text", child): one element. Text is only ever set as text.
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

// Sets a text only if it differs, so that unchanged text is neither laid out nor read out again.
export function text(element, value) {
  const string = String(value);
  if (element.textContent !== string) element.textContent = string;
}

// Says above everything else that a link is wrong; without a message, hides that.
export function notice(message = "") {
  text($("#notice span"), message);
  $("#notice").hidden = !message;
}

// Makes the children of `parent` one element per item, in order. An item keeps the element of its key, so that hover,
// focus and scroll position survive. `update(element, item)` fills it.
export function renderList(parent, items, key, create, update) {
  const old = new Map();
  for (const child of parent.children) old.set(child.dataset.key, child);
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = old.get(name);
    if (element) old.delete(name);
    else {
      element = create(item);
      element.dataset.key = name;
    }
    update?.(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const unused of old.values()) unused.remove();
}

export const count = (number, noun) => `${format(number)} ${noun}${number === 1 ? "" : "s"}`;
export const format = (number) => Number(number).toLocaleString("en-US");
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
