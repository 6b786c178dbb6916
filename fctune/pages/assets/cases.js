"use strict";
(() => {
  const PAGE = 25;
  const make = (name, text, style) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (style) element.className = style;
    return element;
  };

  // Each line of calls with the name above it, which is not indented.
  const linesOf = (text) => {
    let name = "";
    return text.split("\n").map((line) => {
      if (!line.startsWith(" ")) name = line;
      return { line, key: `${name}\n${line}` };
    });
  };

  // Of two texts side by side, the lines that the other lacks, or has fewer times.
  const marked = (text, other, style) => {
    const pre = make("pre");
    const left = new Map();
    for (const { key } of linesOf(other)) left.set(key, (left.get(key) ?? 0) + 1);
    linesOf(text).forEach(({ line, key }, i) => {
      if (i) pre.append("\n");
      const count = left.get(key) ?? 0;
      left.set(key, count - 1);
      pre.append(/\w/.test(line) && count < 1 ? make("span", line, style) : line);
    });
    return pre;
  };

  const makePart = ({ heading, text, kind, other, mark }) => {
    const part = make(kind === "folded" ? "details" : "div");
    part.append(make(kind === "folded" ? "summary" : "h4", heading));
    if (kind === "list") {
      const list = make("ul");
      for (const line of text.split("\n")) list.append(make("li", line));
      part.append(list);
    } else {
      part.append(other === undefined ? make("pre", text) : marked(text, other, mark));
    }
    return part;
  };

  const makeCase = (spec) => {
    const details = make("details", undefined, "case");
    const summary = make("summary");
    for (const tag of spec.tags) summary.append(make("span", tag, "tag"));
    summary.append(spec.title);
    details.append(summary);
    // Filled when it is opened: a page may hold a thousand.
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      const sides = make("div", undefined, "sides");
      for (const part of spec.parts) {
        if (part.other !== undefined) {
          if (!sides.isConnected) details.append(sides);
          sides.append(makePart(part));
        } else details.append(makePart(part));
      }
    });
    return details;
  };

  for (const holder of document.querySelectorAll(".cases")) {
    const cases = JSON.parse(holder.querySelector("script[data-cases]").textContent);
    const words = cases.map((spec) => [spec.title, ...spec.tags, ...spec.parts.map((part) => part.text)].join("\n").toLowerCase());
    const [list, more, count, search] = [".list", ".more", "output", "input"].map((name) => holder.querySelector(name));
    const selects = [...holder.querySelectorAll("select")];
    let found = [], shown = 0;

    const grow = () => {
      for (const spec of found.slice(shown, shown + PAGE)) list.append(makeCase(spec));
      shown = Math.min(found.length, shown + PAGE);
      more.hidden = shown === found.length;
    };
    const narrow = () => {
      const word = search.value.trim().toLowerCase();
      found = cases.filter((spec, i) => words[i].includes(word) &&
        selects.every((select) => !select.value || [].concat(spec.facets[select.dataset.facet]).includes(select.value)));
      list.replaceChildren();
      shown = 0;
      count.textContent = `${found.length.toLocaleString("en-US")} of ${cases.length.toLocaleString("en-US")}`;
      grow();
    };

    for (const select of selects) {
      const counts = new Map();
      for (const spec of cases) {
        for (const value of new Set([].concat(spec.facets[select.dataset.facet]))) counts.set(value, (counts.get(value) ?? 0) + 1);
      }
      select.append(new Option("all", ""));
      for (const value of [...counts.keys()].sort()) select.append(new Option(`${value} (${counts.get(value)})`, value));
      select.addEventListener("change", narrow);
    }
    search.addEventListener("input", narrow);
    more.addEventListener("click", grow);
    narrow();
  }
})();
