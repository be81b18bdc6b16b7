/* The connection to the page's process: login by the code in the address, then a stream that goes on where it was. */
"use strict";
W5.TOKEN = "w5xde-token";
W5.RETRY_SECONDS = 1;

W5.Connection = class {
  constructor(heard, lost) {
    this.heard = heard;
    this.lost = lost;
    this.lastId = null;
    this.abort = null;
  }

  /* Spend the code of the address, which no server and no log has seen, and take it out of the history. */
  async login() {
    const code = new URLSearchParams(location.hash.slice(1)).get("c");
    if (!code) return;
    history.replaceState(null, "", location.pathname);
    const answer = await fetch("/api/login", { method: "POST", body: code });
    if (answer.ok) localStorage.setItem(W5.TOKEN, (await answer.json()).token);
  }

  async get(path, headers, signal) {
    const answer = await fetch(path, { headers: Object.assign({ Authorization: `Bearer ${localStorage.getItem(W5.TOKEN)}` }, headers), signal, cache: "no-store" });
    if (!answer.ok) throw Object.assign(new Error((await answer.text()).trim()), { status: answer.status });
    return answer;
  }
  async json(path) {
    return (await this.get(path, {})).json();
  }

  /* Read the stream of a run, again and again; a hidden page reads nothing. */
  async follow(path) {
    document.addEventListener("visibilitychange", () => { if (document.hidden && this.abort) this.abort.abort(); });
    for (;;) {
      while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
      try {
        this.abort = new AbortController();
        const headers = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
        const answer = await this.get(path, headers, this.abort.signal);
        this.lost(null);
        await this.read(answer.body.getReader());
      } catch (error) {
        if (error.status === 401) return this.lost(error);
        if (!document.hidden) this.lost(error);
      }
      await new Promise((done) => setTimeout(done, 1000 * W5.RETRY_SECONDS));
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the page's process has ended");
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.one(event);
    }
  }

  one(event) {
    let kind = "", data = "", id = null;
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data = line.slice(6);
      else if (line.startsWith("id: ")) id = line.slice(4);
    }
    if (!kind) return;
    this.heard(kind, JSON.parse(data));
    /* Only now: what was not shown must come again. */
    if (id !== null) this.lastId = id;
  }
};
