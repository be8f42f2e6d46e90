// Search without a server: pages with all words of the query, those with the words in their titles first. `search_index`
// is in search/index.js.
const load = document.createElement("script");
load.src = base_url + "/search/index.js";
load.onload = () => {
  const field = document.getElementById("mkdocs-search-query"), found = document.getElementById("mkdocs-search-results");
  if (!field) return;
  const text = (name, content) => Object.assign(document.createElement(name), {textContent: content});
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const score = ({title, text}) => {
      const [head, body] = [title.toLowerCase(), text.toLowerCase()];
      return words.every(word => head.includes(word) || body.includes(word)) ? 1 + words.filter(word => head.includes(word)).length : 0;
    };
    const hits = words.length ? search_index.map(page => [score(page), page]).filter(([points]) => points) : [];
    hits.sort(([one], [other]) => other - one);
    found.replaceChildren(...hits.slice(0, 30).map(([, page]) => {
      const article = document.createElement("article"), link = text("a", page.title);
      const at = page.text.lastIndexOf(" ", Math.max(0, page.text.toLowerCase().indexOf(words[0]) - 60)) + 1;
      link.href = base_url + "/" + page.location;
      article.append(text("h3", ""), text("p", page.text.slice(at, at + 240)));
      article.firstChild.append(link);
      return article;
    }));
    if (!hits.length) found.replaceChildren(text("p", words.length ? "Nothing has all of these words." : ""));
  };
  field.value = new URLSearchParams(location.search).get("q") || "";
  field.addEventListener("input", show);
  field.form.addEventListener("submit", event => event.preventDefault());
  show();
};
document.head.append(load);
