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

  const number = (value) => typeof value === "number" ? value.toLocaleString("en-US", { maximumFractionDigits: 4 }) : value;

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
    if (spec.kind === "lines") { names.type = "linear"; names.ticks.callback = number; names.ticks.color = color("muted"); }
    return {
      responsive: true, maintainAspectRatio: false, animation: false, indexAxis: sideways ? "y" : "x",
      interaction: { mode: spec.kind === "lines" ? "nearest" : "index", axis: sideways ? "y" : "x", intersect: false },
      scales: sideways ? { x: values, y: names } : { x: names, y: values },
      plugins: {
        legend: { display: spec.series.length > 1, labels: { color: color("ink"), boxWidth: 12 } },
        tooltip: { callbacks: { label: (item) =>
          `${item.dataset.label}: ${number(sideways ? item.parsed.x : item.parsed.y)}` } },
      },
    };
  };

  const data = (spec) => ({
    labels: spec.kind === "lines" ? undefined : spec.labels,
    datasets: spec.series.map((series, i) => {
      const shade = color(`series-${(i % 5) + 1}`);
      return spec.kind === "lines"
        ? { label: series.name, data: series.values.map((y, j) => ({ x: spec.labels[j], y })), borderColor: shade,
            backgroundColor: shade, borderWidth: 2, pointRadius: 0, tension: 0 }
        : { label: series.name, data: series.values, backgroundColor: shade, maxBarThickness: 26,
            borderRadius: 3, categoryPercentage: spec.kind === "histogram" ? 1 : 0.8,
            barPercentage: spec.kind === "histogram" ? 0.94 : 0.9 };
    }),
  });

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
    charts.push([new Chart(canvas, { type: spec.kind === "lines" ? "line" : "bar", data: data(spec), options: options(spec) }), spec]);
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fctune-theme", theme); } catch { /* a page opened from a file may have no storage */ }
    setTheme(theme);
  });
  system.addEventListener("change", () => { if (!stored()) setTheme(system.matches ? "dark" : "light"); });
  setTheme(stored() ?? (system.matches ? "dark" : "light"));
  root.dataset.ready = String(charts.length);
})();
