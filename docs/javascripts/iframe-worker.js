// Search needs a worker, which browsers refuse to pages opened from disk: there, a hidden frame takes its place.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.receive = (data) => this.receive(new MessageEvent("message", { data }));
      document.body.append(frame);
      this.window = frame.contentWindow;
      this.ready = new Promise((resolve) => { frame.onready = resolve; });
      frame.contentDocument.open();
      frame.contentDocument.write(
        "<!doctype html><script>self.postMessage = (data) => frameElement.receive(data);</script>" +
        `<script src="${String(url).replace(/"/g, "&quot;")}"></script><script>frameElement.onready()</script>`,
      );
      frame.contentDocument.close();
    }

    receive(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      this.ready.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.window.frameElement.remove();
    }
  };
}
