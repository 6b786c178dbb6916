"use strict";
(() => {
  const root = document.documentElement;
  const button = document.querySelector("button.theme");
  const charts = [];

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("fctune-theme"); } catch { return null; } };
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    draw();
  };

  // Four digits after the point, but of small numbers, such as a learning rate, the first four that say something.
  const number = (value) => {
    if (typeof value !== "number") return value;
    const size = Math.abs(value);
    if (size > 0 && size < 1e-4) return Number(value.toPrecision(4)).toExponential();
    return value.toLocaleString("en-US", size < 0.1 ? { maximumSignificantDigits: 4 } : { maximumFractionDigits: 4 });
  };

  // Long names take a third of the width at most: they break at spaces, and end in dots where they have none.
  const wrap = (name, limit) => {
    const lines = [];
    for (const word of String(name).split(" ")) {
      const last = lines.length - 1;
      if (last >= 0 && lines[last].length + word.length < limit) lines[last] += ` ${word}`;
      else lines.push(word.length > limit ? `${word.slice(0, limit - 1)}…` : word);
    }
    return lines.slice(0, 2);
  };

  const options = (spec) => {
    const sideways = spec.kind === "bars";
    const values = { grid: { color: color("grid") }, ticks: { color: color("muted"), callback: number },
      beginAtZero: spec.kind !== "lines", border: { display: false },
      title: { display: Boolean(spec.value_label), text: spec.value_label, color: color("muted") } };
    const names = { grid: { display: false },
      ticks: { color: color("ink"), autoSkip: !sideways, maxRotation: 0 }, border: { color: color("line") },
      title: { display: Boolean(spec.name_label) && !sideways, text: spec.name_label, color: color("muted") } };
    if (sideways) {
      const limit = root.clientWidth < 560 ? 16 : 30;
      names.ticks.callback = function (value) { return wrap(this.getLabelForValue(value), limit); };
    }
    if (spec.is_log) {  // every tick of a decade, labelled, would write over the next one
      values.type = "logarithmic";
      values.ticks.callback = (value) => /^[125](\.0*)?e/.test(value.toExponential(4)) ? number(value) : null;
    }
    if (spec.kind === "lines") { names.type = "linear"; names.ticks.callback = number; names.ticks.color = color("muted"); }
    if (spec.is_log_labels) {
      Object.assign(names, { type: "logarithmic", min: spec.labels[0], max: spec.labels.at(-1) });
      // Over more than two decades, their beginnings alone: more labels would write over one another.
      const labelled = spec.labels.at(-1) > 100 * spec.labels[0] ? /^1(\.0*)?e/ : /^[125](\.0*)?e/;
      names.ticks.callback = (value) => labelled.test(value.toExponential(4)) ? number(value) : null;
    }
    if (spec.is_log_size) {
      names.ticks.stepSize = 2;
      names.ticks.callback = (value) => value < 0 ? `${number(1024 * 2 ** value)} KiB` : `${number(2 ** value)} MiB`;
    }
    return {
      responsive: true, maintainAspectRatio: false, animation: false, indexAxis: sideways ? "y" : "x",
      interaction: { mode: spec.kind === "lines" ? "nearest" : "index", axis: sideways ? "y" : "x", intersect: false },
      scales: sideways ? { x: values, y: names } : { x: names, y: values },
      plugins: {
        marks: { at: spec.marks },
        legend: { display: spec.series.length > 1, labels: { color: color("ink"), boxWidth: 12,
          sort: (one, other) => one.datasetIndex - other.datasetIndex } },
        tooltip: { callbacks: { label: (item) =>
          `${item.dataset.label}: ${number(sideways ? item.parsed.x : item.parsed.y)}` } },
      },
    };
  };

  const data = (spec) => ({
    labels: spec.kind === "lines" ? undefined : spec.labels,
    datasets: spec.series.map((series, index) => {
      const i = spec.series.slice(0, index + 1).filter((one) => !one.is_faint).length - 1;
      const shade = color(`series-${(i % 5) + 1}`) + (series.is_faint ? "55" : "");
      return spec.kind === "lines"
        ? { label: series.name, data: series.values.map((y, j) => ({ x: spec.labels[j], y })), borderColor: shade,
            backgroundColor: shade, order: series.is_faint ? 1 : -i, borderWidth: series.is_faint ? 1 : series.values.length > 300 ? 1.3 : 2,
            borderDash: i < 5 ? [] : i < 10 ? [7, 4] : [2, 3],  // where the colours begin again
            pointRadius: series.is_sparse && series.values.filter((y) => y !== null).length <= 60 ? 2.5 : 0,
            clip: 5,  // points and ends of lines on the edge of the chart are drawn whole
            spanGaps: series.is_sparse, tension: 0 }
        : { label: series.name, data: series.values, backgroundColor: shade, maxBarThickness: 26,
            borderRadius: 3, categoryPercentage: spec.kind === "histogram" ? 1 : 0.8,
            barPercentage: spec.kind === "histogram" ? 0.94 : 0.9 };
    }),
  });

  // What happened at a step: restarts over the full height, alerts at the top, checkpoints at the bottom.
  const marks = { id: "marks", afterDatasetsDraw(chart, _, { at }) {
    const { ctx, chartArea: area, scales: { x } } = chart;
    const shades = { restart: color("bad"), alert: color("warn"), checkpoint: color("good") };
    ctx.save();
    for (const mark of at ?? []) {
      const place = x.getPixelForValue(mark.at);
      if (place < area.left - 1 || place > area.right + 1) continue;
      ctx.strokeStyle = ctx.fillStyle = shades[mark.kind];
      ctx.beginPath();
      if (mark.kind === "restart") {
        ctx.setLineDash([5, 4]); ctx.lineWidth = 1.5;
        ctx.moveTo(place, area.top); ctx.lineTo(place, area.bottom); ctx.stroke();
        ctx.setLineDash([]);
      } else {
        const [edge, tip] = mark.kind === "alert" ? [area.top, area.top + 9] : [area.bottom, area.bottom - 9];
        ctx.moveTo(place - 5, edge); ctx.lineTo(place + 5, edge); ctx.lineTo(place, tip); ctx.fill();
      }
    }
    ctx.restore();
  } };

  function draw() {
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    for (const [chart, spec] of charts) {
      chart.options = options(spec);
      chart.data = data(spec);
      chart.update("none");
    }
  }

  for (const holder of document.querySelectorAll("script[type='application/json'][data-chart]")) {
    const spec = JSON.parse(holder.textContent);
    const canvas = document.getElementById(holder.dataset.chart);
    charts.push([new Chart(canvas, { type: spec.kind === "lines" ? "line" : "bar", data: data(spec), options: options(spec),
      plugins: [marks] }), spec]);
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fctune-theme", theme); } catch { /* a page opened from a file may have no storage */ }
    setTheme(theme);
  });
  system.addEventListener("change", () => { if (!stored()) setTheme(system.matches ? "dark" : "light"); });
  setTheme(stored() ?? (system.matches ? "dark" : "light"));

  // Paper is white, and a chart that was drawn for the window's width is not one for a sheet's.
  let shown = null;
  addEventListener("beforeprint", () => {
    shown = root.dataset.theme;
    setTheme("light");
    for (const [chart] of charts) chart.resize(Math.min(chart.width, 620), chart.height);
  });
  addEventListener("afterprint", () => { setTheme(shown); for (const [chart] of charts) chart.resize(); });
  root.dataset.ready = String(charts.length);
})();
