// A running server: one stream of a snapshot and deltas. After a lost frame, the stream is opened again. Of several
// engines behind the server, one is shown; the stream says when there are more.

import { $, h, notice, text } from "./dom.mjs";
import { showRanks } from "./panels.mjs";
import { FrameLost } from "./pool.mjs";
import { fetchJson } from "./server.mjs";

const RETRY_MS = 1500;

export class Live {
  constructor(stage, title, numEngines) {
    this.stage = stage;
    this.title = title.split("/").at(-1); // the last part of a model's path
    this.engine = this.numEngines = 0;
    $("#engine").onchange = (event) => (location.hash = `live=${event.target.value}`);
    this._listEngines(numEngines);
  }

  _listEngines(num) {
    if (num <= this.numEngines) return;
    this.numEngines = num;
    const options = Array.from({ length: num }, (_, i) => h("option", { value: i }, `${i} of ${num}`));
    $("#engine").replaceChildren(...options);
    $("#engine").value = this.engine;
    $("#engines").hidden = num < 2;
  }

  // `engine`: its number, from the link.
  enter(engine) {
    const isKnown = /^\d{0,9}$/.test(engine) && Number(engine) < this.numEngines;
    if (!isKnown) notice(`The server has no engine “${engine.slice(0, 60)}”; this is engine 0.`);
    $("#engine").value = this.engine = isKnown ? Number(engine) : 0;
    this.stage.onPick = (block) => this._fetchBlock(block, this.engine);
    this.numDeltas = 0;
    this._connect();
  }

  leave() {
    clearTimeout(this.retryTimer);
    this.source?.close();
    this._setStatus("", "");
  }

  _connect() {
    this._setStatus("wait", "connecting");
    this._showRanks([]);
    const source = (this.source = new EventSource(`events?replica=${this.engine}`));
    source.addEventListener("snapshot", (event) => {
      this.stage.show(JSON.parse(event.data));
      this._setStatus("open", this.title);
    });
    source.addEventListener("delta", (event) => {
      try {
        this.stage.apply(JSON.parse(event.data));
        this.numDeltas++;
      } catch (error) {
        if (!(error instanceof FrameLost)) throw error;
        this._retry("a frame was lost");
      }
    });
    source.addEventListener("engines", (event) => this._listEngines(JSON.parse(event.data).num_replicas));
    source.addEventListener("ranks", (event) => this._showRanks(JSON.parse(event.data).ranks));
    source.addEventListener("bye", (event) => this._retry(JSON.parse(event.data).reason));
    source.onerror = () => this._retry("the server does not respond");
  }

  // The browser reconnects by itself, but not after every kind of failure.
  _retry(reason) {
    this.source.close();
    this._setStatus("lost", `reconnecting: ${reason}`);
    clearTimeout(this.retryTimer);
    this.retryTimer = setTimeout(() => this._connect(), RETRY_MS);
  }

  _setStatus(state, message) {
    $("#connection").dataset.state = state;
    text($("#connection"), message);
  }

  _showRanks(ranks) {
    showRanks(ranks, $("#ranks"), $("#ranks tbody"));
  }

  async _fetchBlock(block, engine) {
    const details = await fetchJson(`blocks/${block}?replica=${engine}`).catch(() => null);
    if (details && engine === this.engine) this.stage.showDetails(details); // another engine may be shown by now
  }
}
