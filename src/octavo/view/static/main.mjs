// The page: the current use (playground, live or replay), the theme, and the keys.

import { $, notice, text } from "./dom.mjs";
import { MODES } from "./grid.mjs";
import { Live } from "./live.mjs";
import { Playground } from "./playground.mjs";
import { Replay } from "./replay.mjs";
import { fetchJson } from "./server.mjs";
import { Stage } from "./stage.mjs";

const THEME = "octavo-view-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  text($("#theme"), name === "dark" ? "Light colours" : "Dark colours");
}

setTheme(localStorage.getItem(THEME) ?? (dark.matches ? "dark" : "light"));
const stage = new Stage();

function chooseTheme(name) {
  setTheme(name);
  stage.retheme();
}

$("#theme").onclick = () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, name);
  chooseTheme(name);
};
dark.onchange = () => localStorage.getItem(THEME) ?? chooseTheme(dark.matches ? "dark" : "light");
$("#notice a").onclick = () => notice(); // the playground may be shown already, and the address be its own
// Not a use: the address stays.
$("#skip").onclick = (event) => {
  event.preventDefault();
  $("#grid").focus();
};
$("#keys").onclick = () => {
  $("#more").hidePopover(); // the focus is on More then, and returns there
  $("#help").showModal();
};

const uses = {};
let current = null;

// #play, #play=HISTORY, #lesson=ID.STEP, #live, #live=ENGINE, #replay, #replay=SECONDS
async function route() {
  const fragment = location.hash.slice(1);
  const [name, ...rest] = fragment.split("=");
  const requested = { play: "playground", lesson: "playground", live: "live", replay: "replay" }[name];
  const use = requested in uses ? requested : Object.keys(uses).at(-1);
  notice(fragment && use !== requested ? `This page has nothing at #${fragment.slice(0, 60)}.` : "");
  const argument = use !== requested ? "" : name === "lesson" ? fragment : rest.join("=");
  current?.leave();
  stage.clear();
  current = uses[use];
  document.body.dataset.use = use;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.use === use) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    await current.enter(argument);
  } catch (error) {
    text($("#connection"), error.message);
  }
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input:not([type=radio]), select, textarea, dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const mode = MODES[Number(event.key) - 1];
  if (mode && (mode !== "group" || stage.pool?.hasGroups)) stage.colourBy(mode);
  else if (!current?.onKey?.(event.key, event.target)) return;
  event.preventDefault();
});

async function begin() {
  const config = await fetchJson("config");
  stage.onlyOwn = config.only_own;
  $("#only-own").hidden = !config.only_own;
  const factories = {
    playground: () => new Playground(stage),
    live: () => new Live(stage, config.title, config.num_replicas),
    replay: () => new Replay(stage, config.title),
  };
  for (const use of config.uses) {
    uses[use] = factories[use]();
    $(`nav a[data-use=${use}]`).hidden = false;
  }
  $("#notice a").hidden = !uses.playground;
  if (config.title) document.title = `${config.title.split("/").at(-1)} · Octavo view`;
  addEventListener("hashchange", route);
  await route();
}

// Read by the browser tests.
globalThis.octavoView = { stage, uses, summary: () => stage.pool?.summary() };
begin().catch((error) => text($("#connection"), error.message));
