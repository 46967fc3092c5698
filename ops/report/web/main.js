async function load() {
  const packed = Uint8Array.from(atob(byId("data").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (isDark) => { root.dataset.theme = isDark ? "dark" : "light"; };
  dark.addEventListener("change", () => show(dark.matches));
  byId("theme").addEventListener("click", () => show(root.dataset.theme !== "dark"));
  show(dark.matches);
}

theme();
load().then((data) => {
  byId("experiment").textContent = data.experiment;
  byId("iteration").textContent = `iteration ${data.iteration}`;
  headline(data);
  curves(data);
  measures(data);
  distributions(data);
  origin(data);
  viewer(data);
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  byId("overview").append(el("div", { class: "card" }, `This page could not be drawn: ${error}. It needs a browser of 2023 or later.`));
});
