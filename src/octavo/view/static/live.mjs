// A running server: one stream of a snapshot and deltas. After a lost frame, the stream is opened again.

import { $, text } from "./dom.mjs";
import { FrameLost } from "./pool.mjs";
import { fetchJson } from "./server.mjs";

const RETRY_MS = 1500;

export class Live {
  constructor(stage, title) {
    this.stage = stage;
    this.title = title.split("/").at(-1); // the last part of a model's path
  }

  enter() {
    this.stage.onPick = (block) => this._fetchBlock(block);
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
    const source = (this.source = new EventSource("events"));
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

  async _fetchBlock(block) {
    const details = await fetchJson(`blocks/${block}`).catch(() => null);
    if (details) this.stage.showDetails(details);
  }
}
