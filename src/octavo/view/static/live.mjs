// A running server, as it goes: one stream of a snapshot and deltas. Whoever falls behind begins anew.

import { $, text } from "./dom.mjs";
import { OutOfStep } from "./pool.mjs";
import { ask } from "./server.mjs";

const AGAIN_MS = 1500;

export class Live {
  constructor(stage, title) {
    this.stage = stage;
    this.title = title.split("/").at(-1); // of a model's path, its name
  }

  enter() {
    this.stage.onPick = (block) => this._ask(block);
    this.numDeltas = 0;
    this._connect();
  }

  leave() {
    clearTimeout(this.again);
    this.source?.close();
    this._say("", "");
  }

  _connect() {
    this._say("wait", "connecting");
    const source = (this.source = new EventSource("events"));
    source.addEventListener("snapshot", (event) => {
      this.stage.show(JSON.parse(event.data));
      this._say("open", this.title);
    });
    source.addEventListener("delta", (event) => {
      try {
        this.stage.apply(JSON.parse(event.data));
        this.numDeltas++;
      } catch (error) {
        if (!(error instanceof OutOfStep)) throw error;
        this._retry("fell out of step");
      }
    });
    source.addEventListener("bye", (event) => this._retry(JSON.parse(event.data).reason));
    source.onerror = () => this._retry("the server does not answer");
  }

  // The browser would reconnect by itself, but not after every kind of end.
  _retry(why) {
    this.source.close();
    this._say("lost", `connecting again: ${why}`);
    clearTimeout(this.again);
    this.again = setTimeout(() => this._connect(), AGAIN_MS);
  }

  _say(state, words) {
    $("#connection").dataset.state = state;
    text($("#connection"), words);
  }

  async _ask(block) {
    const told = await ask(`blocks/${block}`).catch(() => null);
    if (told) this.stage.tell(told);
  }
}
